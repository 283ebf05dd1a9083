"""Run an engine behind HTTP: `python -m verl.inference --model FOLDER`."""

from verl.utils.announcing import gc_paused
from verl.utils.logs import start_logging

if __name__ == "__main__":
    start_logging("inference")
    with gc_paused():
        from verl.inference.server import main  # imports torch, which reads what the line above sets

    main()
