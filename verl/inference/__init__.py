"""An engine behind HTTP: OpenAI's API for any client, sessions that keep what was sampled for training."""
