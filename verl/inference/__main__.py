"""Run an engine behind HTTP: `python -m verl.inference --model FOLDER`."""

from verl.utils.announcing import gc_paused

if __name__ == "__main__":
    with gc_paused():
        from verl.inference.server import main  # imports torch, which reads what the line above sets

    main()
