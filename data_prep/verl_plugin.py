"""The hooks that this package provides for the programs of verl (see verl/plugins.py)."""

from verl.plugins import provide

provide("benchmark_file", "data_prep.benchmarks:benchmark_file")
provide("fetch_model", "data_prep.hub:fetch_model")
provide("corpus_questions", "data_prep.corpus_questions:CorpusQuestions")
