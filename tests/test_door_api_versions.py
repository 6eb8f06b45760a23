"""REST: a patch changes what it names, and an edit of what somebody has changed meanwhile is refused."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import pytest
from django.contrib.auth.models import Permission, User

from catalog.hiding import HIDDEN
from catalog.models import Model, Profile
from tests.cast import PROFILE, a_model, a_node, a_replica, alice, edited, model_form, viola
from tests.rest_client import Api, field, sentence

pytestmark = [pytest.mark.django_db, pytest.mark.one_database]


@pytest.fixture
def api() -> Api:
    return Api(alice())


# --- a patch --------------------------------------------------------------------------------------

FULL = model_form(
    description="old",
    aliases=["small"],
    scaling={"min": 1, "max": 2, "idle_timeout": "20m"},
    slo={"TTFTp99": "800ms", "TPOTp99": "40ms"},
    capabilities={"tools": True},
    context_length=4096,
)


@pytest.mark.parametrize(
    ("patch", "changed"),
    [
        pytest.param({"description": "new"}, {"description": "new"}, id="one field"),
        pytest.param({"description": None}, {"description": None}, id="one taken back"),
        pytest.param(
            {"scaling": {"max": 3}}, {"scaling": {"min": 1, "max": 3, "idle_timeout": "20m"}}, id="one inside"
        ),
        pytest.param(
            {"scaling": {"idle_timeout": None}}, {"scaling": {"min": 1, "max": 2}}, id="one inside taken back"
        ),
        pytest.param({"aliases": ["tiny-1"]}, {"aliases": ["tiny-1"]}, id="a list is replaced whole"),
        pytest.param(
            {"slo": {"ttft_p99": "1s"}}, {"slo": {"TTFTp99": "1s", "TPOTp99": "40ms"}}, id="another spelling"
        ),
        pytest.param({"name": "tinier"}, {"name": "tinier"}, id="the name"),
        pytest.param({"status": {"ready": 9}, "why": "looked"}, {}, id="what is told, and never taken"),
        pytest.param({}, {}, id="nothing"),
    ],
)
def test_a_patch_changes_what_it_names(api: Api, patch: Any, changed: dict[str, Any]) -> None:
    _, before = api("POST", "models", FULL)
    status, after = api("PATCH", "models/tiny", patch)
    assert status == 200
    for form in (before, after):
        del form["status"]
    assert after == {key: value for key, value in (before | changed).items() if value is not None}


@pytest.mark.parametrize(
    ("patch", "where", "says"),
    [
        pytest.param(
            {"nmae": "x"}, "nmae", 'model "tiny": unknown key "nmae"; did you mean name?', id="a key"
        ),
        pytest.param([], "", "the model: it must be a map of fields, not a list", id="a list"),
        pytest.param({"source": None}, "source", 'model "tiny": source is required', id="what must be there"),
        pytest.param(
            {"scaling": {"max": 0, "min": 5}, "context_length": "long"},
            "context_length",
            'model "tiny": context_length must be a whole number, not a text',
            id="a text for a number",
        ),
    ],
)
def test_a_patch_that_the_law_refuses_changes_nothing(api: Api, patch: Any, where: str, says: str) -> None:
    revision = a_model().revision
    status, answer = api("PATCH", "models/tiny", patch)
    assert (status, answer["errors"][0]["field"]) == (400, where)
    assert answer["errors"][0]["sentence"] == says
    assert Model.objects.get().revision == revision


# --- versions -------------------------------------------------------------------------------------


def test_every_answer_of_one_model_carries_its_version(api: Api) -> None:
    versions = [
        api.ask(*asked)["ETag"]
        for asked in (
            ("POST", "models", model_form()),
            ("GET", "models/tiny"),
            ("PATCH", "models/tiny", {"description": "new"}),
            ("PUT", "models/tiny", model_form()),
            ("GET", "models/tiny"),
        )
    ]
    assert versions[0] == versions[1] < versions[2] < versions[3] == versions[4] == _etag()


def test_what_is_observed_is_no_new_version(api: Api) -> None:
    model = a_model()
    version = _etag()
    a_replica(model, a_node())
    answer = api.ask("GET", "models/tiny")
    assert answer["ETag"] == version
    assert b'"ready":1' in answer.content


def _etag() -> str:
    return f'"{Model.objects.get().revision}"'


EDITS = [
    pytest.param("PUT", model_form(description="mine"), 200, id="a replacement"),
    pytest.param("PATCH", {"description": "mine"}, 200, id="a patch"),
    pytest.param("DELETE", None, 204, id="a removal"),
]


@pytest.mark.parametrize(("method", "body", "status"), EDITS)
@pytest.mark.parametrize("version", ["the one read", "any", "none"])
def test_an_edit_of_what_one_has_read_goes_through(
    api: Api, method: str, body: Any, status: int, version: str
) -> None:
    a_model()
    told = {"the one read": {"If-Match": _etag()}, "any": {"If-Match": "*"}, "none": {}}[version]
    assert api(method, "models/tiny", body, **told)[0] == status


@pytest.mark.parametrize(("method", "body", "status"), EDITS)
def test_an_edit_of_what_has_changed_since_is_refused_with_the_changes(
    api: Api, method: str, body: Any, status: int
) -> None:
    a_model()
    read = _etag()
    bob = User.objects.create_superuser("bob")
    assert Api(bob)("PATCH", "models/tiny", {"description": "bob's", "why": "for the trial"})[0] == 200
    assert Api(bob)("PATCH", "models/tiny", {"scaling": {"max": 5}})[0] == 200
    status, answer = api(method, "models/tiny", body, **{"If-Match": read})
    says = 'model "tiny" was changed by bob since you read it; read it again, and repeat the edit'
    assert sentence((status, answer)) == (412, says)
    first, second = answer["changes"]
    assert (first["by"], first["why"], first["door"]) == ("bob", "for the trial", "api")
    assert first["detail"]["changed"] == [{"field": "description", "was": None, "now": "bob's"}]
    assert second["detail"]["changed"][0]["field"] == "scaling"
    assert Model.objects.get().description == "bob's"


def test_changes_hide_what_one_may_not_see(api: Api) -> None:
    model = a_model(profiles=[PROFILE | {"env": {"HF_TOKEN": "abracadabra", "A": "open-to-some"}}])
    read = _etag()
    edited(model, env={"HF_TOKEN": "open sesame", "A": "open-to-others"})
    editor = viola()
    editor.user_permissions.add(Permission.objects.get(codename="change_model"))
    told = {"If-Match": read}
    theirs = Api(editor).ask("PATCH", "models/tiny", {}, **told).content.decode()
    ours = api.ask("PATCH", "models/tiny", {}, **told).content.decode()
    assert "open-to" not in theirs
    assert "open-to-others" in ours
    assert HIDDEN in theirs
    for text in (theirs, ours):
        assert "abracadabra" not in text
        assert "open sesame" not in text


@pytest.mark.parametrize(
    "version", ["12", '"twelve"', 'W/"12"', '""', '"1", "2"', "'1'", '"' + "9" * 30 + '"']
)
@pytest.mark.parametrize("method", ["PUT", "PATCH", "DELETE"])
def test_a_version_that_is_none_is_refused(api: Api, method: str, version: str) -> None:
    a_model()
    answer = api(method, "models/tiny", {}, **{"If-Match": version})
    assert field(answer) == (400, "If-Match", "if_match")
    assert "send the ETag of what you have read, or *" in sentence(answer)[1]
    assert Model.objects.count() == 1


def test_a_version_of_what_is_not_there_is_not_found(api: Api) -> None:
    assert api("PUT", "models/tiny", model_form(), **{"If-Match": "*"})[0] == 404
    assert api("DELETE", "models/tiny", **{"If-Match": '"1"'})[0] == 404


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["org/tiny", "a/check", "a/profiles/b", "check", "a//b", "ä b?#%/é", "a/"])
def test_a_name_is_an_address_whatever_is_in_it(api: Api, name: str) -> None:
    a_model("a")
    made = api.ask("POST", "models", model_form(name))
    path = f"models/{quote(name, safe='/')}" + ("/" if name.endswith("/") else "")
    assert made["Location"].endswith(f"/api/{path}")
    assert api("GET", path)[1]["name"] == name
    assert api("PATCH", path, {"description": "new"})[1]["description"] == "new"
    assert api("DELETE", path)[0] == 204
    assert [model.name for model in Model.objects.all()] == ["a"]
    assert Profile.objects.count() == 1


def test_a_profile_tells_what_it_will_run(api: Api) -> None:
    a_model("a/b", profiles=[PROFILE | {"env": {"HF_TOKEN": "abracadabra", "A": "open-to-some"}}])
    status, told = api("GET", "models/a/b/profiles/default")
    assert (status, told["model"], told["profile"]) == (200, "a/b", "default")
    assert told["needs"]["words"] == "1 node with sim, 1 x sim"
    assert "<port>" in told["command_line"]
    assert (told["env"]["A"], told["env"]["HF_TOKEN"]) == ("open-to-some", HIDDEN)
    assert [each["field"] for each in told["warnings"]] == ["env"]
    assert Api(viola())("GET", "models/a/b/profiles/default")[1]["env"]["A"] == HIDDEN


@pytest.mark.parametrize("name", ["p", "p/profiles/q", "profiles/p"])
def test_a_profile_is_found_whatever_is_in_the_names(api: Api, name: str) -> None:
    for model in ("a", "a/profiles", "a/profiles/p"):
        a_model(model, profiles=[PROFILE | {"name": name}])
    for model in ("a/profiles/p", "a"):
        assert api("GET", f"models/{model}/profiles/{name}/")[1]["model"] == model
        Model.objects.filter(name__startswith="a/").delete()


def test_a_profile_that_is_not_there(api: Api) -> None:
    a_model()
    says = 'model "tiny" has no profile "other"; it has "default"'
    assert sentence(api("GET", "models/tiny/profiles/other")) == (404, says)
    unknown = 'model "nobody/profiles/default" is not in the catalog; check the spelling'
    assert sentence(api("GET", "models/nobody/profiles/default")) == (404, unknown)
    assert sentence(api("GET", "models/" + "a/profiles/" * 700 + "b"))[0] == 404
    assert sentence(api("PUT", "models/tiny/profiles/default", model_form()))[0] == 404
