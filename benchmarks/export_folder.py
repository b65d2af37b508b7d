"""Write a GGUF file as a Hugging Face folder in float32, for engines that do not read GGUF. Needs transformers."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from side import options_of


def main() -> None:
    options = options_of(__doc__, ("--gguf", Path), ("--folder", Path))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        options.gguf.parent, gguf_file=options.gguf.name, dtype=torch.float32
    )
    # A model that came from GGUF refuses to be saved, though its weights are plain numbers: a new one takes them.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    plain = transformers.AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(options.folder)


if __name__ == "__main__":
    main()
