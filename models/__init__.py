"""What is computed: the layers shared by all architectures, and one folder for each architecture."""
