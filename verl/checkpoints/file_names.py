"""Names of files in a run's folder that programs without torch read, too."""

NEWEST_STEP_FILE = "latest_checkpointed_iteration.txt"
RESTARTS_FILE = "restarts.jsonl"
