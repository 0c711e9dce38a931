"""The first hour on an Ascend machine: stages that check what could not be checked without one, and one report."""
