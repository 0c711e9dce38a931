"""What a case is: its keys, the rules between them, where cases are found, and static facts about platforms."""
