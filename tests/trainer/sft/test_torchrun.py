"""Supervised training under torchrun, as verl's is started: the command that works is named, once."""

from verl.trainer.fsdp_sft_trainer import run


def test_the_command_for_as_many_processes_is_named_by_the_first_of_them(monkeypatch, capsys):
    arguments = ["data.train_files=my rows.parquet", "trainer.nnodes=1"]
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "0")
    assert run(arguments) == 2
    error = capsys.readouterr().err
    assert "Found WORLD_SIZE=16, as torchrun sets it" in error
    assert error.endswith(
        "python -m verl.trainer.fsdp_sft_trainer 'data.train_files=my rows.parquet' trainer.nnodes=2 "
        "trainer.n_gpus_per_node=8\n"
    )
    monkeypatch.setenv("RANK", "9")
    assert run(arguments) == 2
    assert capsys.readouterr().err == ""
