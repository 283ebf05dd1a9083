"""The checkpoints of a run: its state, the store of its folders, and their copies at a remote place."""
