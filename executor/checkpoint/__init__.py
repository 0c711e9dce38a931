"""From a checkpoint's files to a model's weights: streamed, checked and proven complete."""
