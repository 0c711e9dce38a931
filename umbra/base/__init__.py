"""The ground floor, which everything else may import: errors that a user can correct, and files that appear whole."""
