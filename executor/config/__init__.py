"""Cases: their keys, the rules between keys, finding and reading them, and static facts about platforms."""
