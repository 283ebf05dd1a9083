"""Packed rows: packs without padding, the attention over them, and log-probs without whole logits."""
