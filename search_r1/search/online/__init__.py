"""Search engines on the web as a backend: SerpAPI, Google's Custom Search, any JSON API by a template."""
