"""The policy that decides which experts are resident."""
