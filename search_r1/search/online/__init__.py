"""Search engines on the web as a backend: SerpAPI and Google's Custom Search."""
