"""The layers that model families are made of, one file for each kind; `base` says what a layer is."""
