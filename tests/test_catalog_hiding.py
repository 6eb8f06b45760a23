"""Secrets in a profile's environment are hidden, and hiding loses nothing."""

from typing import Any

import pytest

from catalog.hiding import HIDDEN, hide_all, hide_model, looks_secret, unhide_model
from catalog.reading import CatalogError
from catalog.spec import ModelSpec

MODEL: dict[str, Any] = {
    "name": "m",
    "source": "org/m",
    "profiles": [
        {"name": "p", "gpu_class": "h100", "env": {"HF_TOKEN": "abc", "OMP_NUM_THREADS": "8"}},
        {"name": "q", "gpu_class": "h100"},
    ],
}


@pytest.mark.parametrize(
    ("name", "value", "answer"),
    [
        pytest.param("HF_TOKEN", "abc", True, id="a token"),
        pytest.param("OPENAI_API_KEY", "abc", True, id="an API key"),
        pytest.param("AWS_SECRET_ACCESS_KEY", "abc", True, id="a secret key"),
        pytest.param("db-password", "abc", True, id="a password in another case"),
        pytest.param("HF_TOKEN", "", False, id="an empty token is no secret"),
        pytest.param("HF_TOKEN", "secret:HF_TOKEN", False, id="a reference to a secret is none"),
        pytest.param("HF_TOKEN", "secret:not a name", True, id="what only begins like a reference"),
        pytest.param("TOKENIZERS_PARALLELISM", "false", False, id="tokenizers are no token"),
        pytest.param("VLLM_MAX_TOKENS", "10", False, id="a number of tokens is no token"),
        pytest.param("KEYBOARD", "us", False, id="a keyboard is no key"),
        pytest.param("PROXY", "http://me:mine@proxy", True, id="a password in a URL"),
        pytest.param("PROXY", "http://proxy:3128", False, id="a URL without one"),
        pytest.param("X", "hf_abcdefghijklmnopqrst", True, id="the shape of a token under any name"),
    ],
)
def test_what_looks_like_a_secret(name: str, value: str, answer: bool) -> None:
    assert looks_secret(name, value) is answer


@pytest.mark.parametrize(
    ("sees_env", "threads"),
    [
        pytest.param(True, "8", id="to who may see the environment, all but secrets"),
        pytest.param(False, HIDDEN, id="to who may not, names alone"),
    ],
)
def test_hidden_values_that_come_back_mean_what_is_stored(sees_env: bool, threads: str) -> None:
    shown = hide_model(MODEL, sees_env=sees_env)
    assert shown["profiles"][0]["env"] == {"HF_TOKEN": HIDDEN, "OMP_NUM_THREADS": threads}
    assert unhide_model(shown, ModelSpec.load(MODEL)) == MODEL


def test_who_says_nothing_of_who_looks_shows_no_value() -> None:
    assert hide_model(MODEL) == hide_model(MODEL, sees_env=False)
    assert hide_all({"env": {"A": "1", "B": ""}}) == {"env": {"A": HIDDEN, "B": HIDDEN}}


def test_a_hidden_value_for_nothing_is_refused() -> None:
    shown = hide_model(MODEL)
    shown["profiles"][0]["name"] = "other"
    with pytest.raises(CatalogError) as no:
        unhide_model(shown, ModelSpec.load(MODEL))
    says = "is (hidden), which stands for nothing stored; type its value"
    assert [fault.sentence for fault in no.value.faults] == [
        f'model "m" profile "other": env "{name}" {says}' for name in ("HF_TOKEN", "OMP_NUM_THREADS")
    ]


@pytest.mark.parametrize(
    "raw", [[], 7, {}, {"profiles": 3}, {"profiles": [3, {"env": 4}, {"env": {"A": []}}]}]
)
def test_what_is_no_model_is_left_to_the_law(raw: Any) -> None:
    assert unhide_model(raw, None) == raw


def test_what_is_only_shown_hides_secrets_at_any_depth() -> None:
    launch = {"model": "m", "profile": MODEL["profiles"][0], "seen": ["http://me:mine@proxy", 3, None]}
    shown = hide_all(launch, sees_env=True)
    assert shown["profile"]["env"] == {"HF_TOKEN": HIDDEN, "OMP_NUM_THREADS": "8"}
    assert shown["seen"] == [HIDDEN, 3, None]
    assert shown["model"] == "m"


@pytest.mark.parametrize(
    ("detail", "seen"),
    [
        pytest.param(
            {"profiles_changed": {"p": [{"field": "env", "was": {"A": "1"}, "now": {"A": "2"}}]}},
            {"profiles_changed": {"p": [{"field": "env", "was": {"A": HIDDEN}, "now": {"A": HIDDEN}}]}},
            id="what an edit changed in an environment",
        ),
        pytest.param(
            {"changed": [{"field": "env", "was": None, "now": {"A": "2"}}]},
            {"changed": [{"field": "env", "was": None, "now": {"A": HIDDEN}}]},
            id="an environment where none was",
        ),
        pytest.param(
            {"model": {"profiles": [{"env": {"A": "1"}, "args": ["--a"]}]}},
            {"model": {"profiles": [{"env": {"A": HIDDEN}, "args": ["--a"]}]}},
            id="a whole model",
        ),
        pytest.param({"env": "prod"}, {"env": "prod"}, id="a label that is called env"),
        pytest.param(
            {"field": "tp", "was": 1, "now": 2}, {"field": "tp", "was": 1, "now": 2}, id="another field"
        ),
    ],
)
def test_an_environment_is_hidden_wherever_it_is_told(detail: Any, seen: Any) -> None:
    assert hide_all(detail) == seen
    assert hide_all(detail, sees_env=True) == detail
