"""A device that computes with what the ops mean, to show what a device needs: this folder, and a row."""
