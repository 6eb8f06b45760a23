"""What plots are drawn from, through its doors: REST, the command, and the pages that `plot.js` fills."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable
from datetime import timedelta
from io import StringIO
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from django.contrib.auth.models import Permission, User
from django.contrib.staticfiles import finders
from django.core.management import CommandError, call_command
from django.db import connection, transaction
from django.test import Client
from django.test.utils import CaptureQueriesContext

from catalog.models import database_now
from nodes import samples
from nodes.sampling import MINUTE_S, SPANS, floor
from nodes.tallies import Tally
from nodes.usage import add_lot
from tests.bench.page_times import measure
from tests.cast import a_model, a_node, a_replica, alice, viola
from tests.pages import page
from tests.rest_client import Api, sentence

pytestmark = [pytest.mark.django_db, pytest.mark.one_database]

NAMES = ("tiny", "org/tiny", "a b?#%")


@pytest.fixture
def api() -> Api:
    return Api(alice())


def happened(subject: str = "tiny", kind: str = "model", **measured: Any) -> None:
    """So far, in each of the five minutes before the last one; and to a model, three requests in each."""
    minute = floor(database_now(), MINUTE_S) - timedelta(minutes=1)
    for back in range(1, 6):
        at = minute - timedelta(minutes=back)
        samples.keep(at, {(kind, subject): measured})
        if kind == "model":
            add_lot(uuid.uuid4(), 1, at.timestamp(), {("k", subject, "/v1/chat/completions", "2xx"): some(3)})


def some(requests: int) -> Tally:
    tally = Tally()
    tally.requests, tally.prompt_tokens, tally.cached_tokens = requests, 100, 40
    tally.completion_tokens = 600
    for _ in range(requests):
        tally.observe("ttft", 0.5)
    return tally


def known(told: dict[str, Any]) -> dict[str, list[Any]]:
    """The lines in which something is known, without their gaps."""
    lines = {line["name"]: line["values"] for plot in told["plots"] for line in plot["lines"]}
    assert {len(values) for values in lines.values()} == {told["count"]}
    found = {name: [value for value in values if value is not None] for name, values in lines.items()}
    return {name: values for name, values in found.items() if values}


# --- REST -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_model_tells_how_it_did(api: Api, name: str) -> None:
    a_model(name)
    happened(name, ready=2, running=5)
    status, told = api("GET", f"models/{quote(name, safe='')}/series")
    assert (status, told["kind"], told["name"], told["span"], told["note"]) == (200, "model", name, "1h", "")
    found = known(told)
    assert found["ready"] == [2] * 5
    assert found["running"] == [5] * 5
    assert [value for value in found["requests"] if value] == [0.05] * 5
    assert [value for value in found["completion_tokens"] if value] == [10] * 5
    assert found["prefix_hits"] == [40] * 5
    assert len(found["ttft_p99"]) == 5
    assert all(400 <= value <= 500 for value in found["ttft_p99"])


def test_minutes_in_which_nobody_asked_have_no_times_and_no_requests(api: Api) -> None:
    a_model()
    happened()
    told = api("GET", "models/tiny/series")[1]
    lines = {line["name"]: line["values"] for plot in told["plots"] for line in plot["lines"]}
    asked = [place for place, value in enumerate(lines["requests"]) if value]
    assert asked == [place for place, value in enumerate(lines["ttft_p50"]) if value is not None]
    assert len(asked) == 5
    assert None not in lines["requests"]


@pytest.mark.parametrize("name", NAMES)
def test_a_node_tells_how_it_did(api: Api, name: str) -> None:
    a_node(name)
    happened(name, "node", gpus=8, gpus_used=3, gpu_mib=2048, host_mib=None)
    status, told = api("GET", f"nodes/{quote(name, safe='')}/series?span=1h")
    assert (status, told["kind"], told["name"]) == (200, "node", name)
    assert known(told) == {"gpus": [8] * 5, "gpus_used": [3] * 5, "gpu_mib": [2] * 5}
    units = {plot["name"]: plot["unit"] for plot in told["plots"]}
    assert (units["gpus"], units["gpu_memory"]) == ("GPUs", "GiB")


def test_the_cluster_tells_how_it_did(api: Api) -> None:
    happened("", "cluster", nodes=4, nodes_fresh=3)
    happened("tiny")
    happened("huge")
    told = api("GET", "series")[1]
    found = known(told)
    assert (found["nodes"], found["nodes_fresh"]) == ([4] * 5, [3] * 5)
    assert [value for value in found["requests"] if value] == [0.1] * 5


@pytest.mark.parametrize("span", SPANS)
def test_every_span_is_told_in_whole_steps(api: Api, span: str) -> None:
    a_node()
    told = api("GET", f"nodes/gpu-01/series?span={span}")[1]
    assert (told["span"], told["step_s"], told["count"]) == (span, SPANS[span].step_s, SPANS[span].count)


def test_a_day_is_told_in_means_of_its_minutes(api: Api) -> None:
    a_node()
    begins = floor(database_now() - timedelta(hours=2), 600)
    for minute, value in enumerate((2, 4, None, 6)):
        samples.keep(begins + timedelta(minutes=minute), {("node", "gpu-01"): {"gpus": value}})
    assert known(api("GET", "nodes/gpu-01/series?span=24h")[1]) == {"gpus": [4]}


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("models/tiny/series?span=2h", 400, 'span cannot be "2h"; it is one of 1h, 24h, 30d'),
        ("series?since=1h", 400, None),
        ("models/tiny?span=1h", 400, None),
        ("nodes/gpu-01?span=1h", 400, None),
        ("models/none/series", 404, 'model "none" is not in the catalog; check the spelling'),
        ("nodes/none/series", 404, 'there is no node "none"; GET /api/nodes lists them'),
    ],
    ids=[
        "a span that is not kept", "a parameter that is not known", "a span of a model itself",
        "a span of a node itself", "no such model", "no such node",
    ],
)  # fmt: skip
def test_what_cannot_be_told_is_refused(api: Api, path: str, status: int, says: str | None) -> None:
    a_model()
    a_node()
    found = sentence(api("GET", path))
    assert found[0] == status
    assert says is None or found[1] == says


def test_a_model_whose_name_ends_like_a_series_is_the_model(api: Api) -> None:
    a_model("tiny/series")
    assert api("GET", "models/tiny/series")[1]["source"] == "sim/tiny"
    assert api("GET", "models/tiny/series/series")[1]["name"] == "tiny/series"


def test_whoever_may_not_see_what_all_keys_used_is_told_the_rest() -> None:
    a_model()
    happened(ready=2)
    viewer = viola()
    viewer.user_permissions.remove(Permission.objects.get(codename="all_usage"))
    api = Api(viewer)
    for path in ("models/tiny/series", "series"):
        status, told = api("GET", path)
        assert status == 200
        assert told["note"] == "What requests came to is shown to whoever may see what all keys used."
        assert not {"requests", "ttft", "tokens", "prefixes"} & {plot["name"] for plot in told["plots"]}
        assert {"replicas", "gpus"} <= {plot["name"] for plot in told["plots"]}


@pytest.mark.parametrize(
    ("path", "codename"),
    [("models/tiny/series", "view_model"), ("nodes/gpu-01/series", "view_node"), ("series", "view_cluster")],
)
def test_series_are_for_whoever_may_see_what_they_are_of(path: str, codename: str) -> None:
    a_model()
    a_node()
    somebody = User.objects.create_user("somebody", is_staff=True)
    api = Api(somebody)
    assert api("GET", path)[0] == 403
    somebody.user_permissions.add(Permission.objects.get(codename=codename))
    assert api("GET", path)[0] == 200


@pytest.mark.parametrize("path", ["series", "models/tiny/series", "nodes/gpu-01/series"])
def test_it_takes_the_same_queries_however_much_there_is(api: Api, path: str) -> None:
    def queries(span: str) -> int:
        with CaptureQueriesContext(connection) as captured:
            api("GET", f"{path}?span={span}")
        return len(captured)

    model, node = a_model(), a_node()
    few = [queries(span) for span in SPANS]
    for number in range(5):
        a_model(f"other-{number}")
        a_replica(model, a_node(f"other-{number}"))
        happened(f"other-{number}", ready=1)
    happened(ready=1)
    happened(node.name, "node", gpus=2)
    assert [queries(span) for span in SPANS] == few
    assert max(few) <= 9


# --- the command ----------------------------------------------------------------------------------


def manage(*words: str) -> str:
    out = StringIO()
    call_command("series", *words, stdout=out)
    return out.getvalue()


def test_the_command_tells_a_line_for_each_thing() -> None:
    a_model()
    happened(ready=2)
    told = manage("tiny")
    [line] = [line for line in told.splitlines() if line.startswith("Replicas: ready")]
    assert line.split()[2:7] == ["replicas", "2", "2", "2", "2"]
    assert line.split()[-1].count("█") == 5
    assert line.split()[-1].count("·") == 55
    assert "Replicas: lost" not in told


def test_the_command_tells_json_as_rest_does(api: Api) -> None:
    a_node()
    happened("gpu-01", "node", gpus=2)
    assert known(json.loads(manage("--node", "gpu-01", "--json"))) == known(
        api("GET", "nodes/gpu-01/series")[1]
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["none"], 'model "none" is not in the catalog; check the spelling'),
        (["--node", "none"], 'There is no node "none"; manage.py nodes tells which there are.'),
        (["tiny", "--node", "a"], "Name a model or --node, not both: which requests a node had is not kept."),
    ],
    ids=["no such model", "no such node", "both"],
)
def test_the_command_says_what_it_cannot_tell(words: list[str], says: str) -> None:
    with pytest.raises(CommandError, match="^" + says.replace(".", r"\.")):
        manage(*words)


def test_the_command_says_that_nothing_is_known() -> None:
    a_node()
    assert manage("--node", "gpu-01") == "Nothing is known of the last hour.\n"


# --- the pages ------------------------------------------------------------------------------------


@pytest.fixture
def admin() -> Client:
    client = Client()
    client.force_login(alice())
    return client


@pytest.mark.parametrize(
    ("make", "address", "told"),
    [
        (lambda: a_model("org/<b>").pk, "catalog/model", "/api/models/org%2F%3Cb%3E/series"),
        (lambda: a_node("a/b").pk, "nodes/node", "/api/nodes/a%2Fb/series"),
    ],
    ids=["a model", "a node"],
)
def test_a_page_has_a_place_for_its_plots_and_a_choice_of_spans(
    admin: Client, make: Callable[[], int], address: str, told: str
) -> None:
    html = page(admin, f"/admin/{address}/{make()}/change/")
    assert f'<figure class="plot" data-kept data-url="{told}"' in html
    assert all(f'href="?span={span}"' in html for span in SPANS)
    assert admin.get(told).json()["plots"]
    assert "nodes/plot.js" in html
    assert "nodes/vendor/uPlot.min.css" in html


def test_somebody_who_may_only_look_sees_them_too() -> None:
    model = a_model()
    client = Client()
    client.force_login(viola())
    assert 'data-url="/api/models/tiny/series"' in page(client, f"/admin/catalog/model/{model.pk}/change/")


@pytest.mark.parametrize("name", ["plot.js", "plot.css", "vendor/uPlot.esm.js", "vendor/uPlot.min.css"])
def test_what_draws_them_is_ours_and_runs_under_the_policy(name: str) -> None:
    text = Path(str(finders.find(f"nodes/{name}"))).read_text()
    assert not re.search(r"\beval\(|new Function|innerHTML|setAttribute\(.style|import\(.https?:|url\(", text)


# --- the bench ------------------------------------------------------------------------------------


def test_pages_take_as_many_queries_for_a_dozen_nodes_as_for_four() -> None:
    found = []
    for nodes in (4, 12):
        with transaction.atomic():
            found.append(measure(nodes, days=1, rounds=1))
            transaction.set_rollback(True)
    few, many = found
    assert few["samples"] < many["samples"]
    queries = [[took["queries"] for took in each["pages"].values()] for each in found]
    assert queries[0] == queries[1]
