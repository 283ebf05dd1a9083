"""An engine behind HTTP.

Any client can use OpenAI's API. Sessions keep what was sampled, for training.
"""
