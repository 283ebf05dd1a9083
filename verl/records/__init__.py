"""The records of a run that you can look at, in `trainer.default_local_dir`.

    config.yaml            the configuration, complete and resolved
    metrics.jsonl          one line per step (step 0 is the validation before training)
    summary.json           the run's result
    curves.png             reward, searches, entropy, length over the steps
    trajectories/*.jsonl   some trajectories of each step, in full
    trajectories.html      the same, as one page to read

`RunRecorder` and `LossRecorder` are what the trainers call. `figures.py` has the figures of many rollouts,
and `tags.py` names why rollouts failed.
"""

from verl.records.recorder import LossRecorder, Recorder, RunRecorder

__all__ = ["LossRecorder", "Recorder", "RunRecorder"]
