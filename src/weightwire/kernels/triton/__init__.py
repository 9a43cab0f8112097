"""The hot loops on a GPU: the same bytes as the reference, at the speed of its memory."""
