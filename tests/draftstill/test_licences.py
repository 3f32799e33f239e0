"""The agreements of the licensedcode-data wheel as a corpus."""

import os

import pytest

from draftstill.errors import DraftstillError
from draftstill.readers import unwrap
from tests.draftstill.corpora import fingerprint, prepare, prose, recipe_for


@pytest.fixture
def licences(tmp_path):
    folder = tmp_path / "wheel" / "licensedcode" / "data" / "licenses"
    folder.mkdir(parents=True)

    def add(key, category, text, extra=""):
        (folder / f"{key}.LICENSE").write_text(
            f"---\nkey: {key}\nshort_name: 'a: b'\ncategory: {category}\nurls:\n    - http://x\n{extra}---\n\n{text}\n"
        )

    for i in range(20):
        add(f"firm{i}-eula", "Commercial", prose(i))
    add("maps-tos-2020", "Commercial", prose(30))
    add("maps-tos-2021", "Commercial", prose(31))
    add("mit", "Permissive", prose(32))
    add("old", "Commercial", prose(33), "is_deprecated: yes\n")
    add("deutsch", "Commercial", prose(34), "language: de\n")
    add("dashes", "CLA", prose(35) + "\n---\n" + prose(36))
    (folder / "broken.LICENSE").write_text("no head\n" * 50)
    return tmp_path / "wheel"


def test_licensedcode(tmp_path, licences):
    _, facts, splits = prepare(recipe_for(tmp_path, licences, categories=("Commercial", "CLA"), heldout_fraction=0.2))
    documents = {d.id: d for d in sum(splits.values(), [])}
    assert facts["read"] == 27 and facts["kept"] == 23
    assert facts["rejected"] == {"bad front matter": 1, "deprecated": 1, "other category": 1, "other language": 1}
    assert documents["maps-tos-2021"].group == "maps-tos-2020" and facts["groups"] == 22
    assert documents["dashes"].text == prose(35) + "\n---\n" + prose(36)


def test_unknown_category_lists_the_known_ones(tmp_path, licences):
    with pytest.raises(DraftstillError, match="CLA, Commercial, Permissive") as caught:
        prepare(recipe_for(tmp_path, licences, categories=("Comercial",)))
    assert caught.value.key == "corpus.categories"


def test_unwrap():
    wrapped = "This agreement is made between the two parties named below, who have\nread it and agree to all of its terms and conditions without any further\nreservation.\n\n"  # noqa: E501
    items = "   1. The first item is as long as a line of this page may be, or a bit\n      longer;\n   2. second item\n\nSigned:\nA. Person\nSome Street 5"
    assert unwrap(wrapped + items) == (
        "This agreement is made between the two parties named below, who have read it and agree to all of its terms and conditions "
        "without any further reservation.\n\n"
        "   1. The first item is as long as a line of this page may be, or a bit longer;\n   2. second item\n\n"
        "Signed:\nA. Person\nSome Street 5"
    )
    long_line = "word " * 60 + "\nshort\n" + "word " * 60
    assert unwrap(long_line).count("\n") == 2


def test_licences_with_names_that_are_no_utf8(tmp_path, licences):
    folder = licences / "licensedcode" / "data" / "licenses"
    with open(os.fsencode(folder) + b"/caf\xe9.LICENSE", "w") as file:
        file.write(f"---\ncategory: Commercial\n---\n\n{prose(77)}\n")
    _, _, splits = prepare(recipe_for(tmp_path, licences, heldout_fraction=0.3))
    assert "caf\\xe9" in {d.id for documents in splits.values() for d in documents}


def test_the_licences_of_a_folder_decide(tmp_path, licences):
    recipe = recipe_for(tmp_path, licences)
    before = fingerprint(recipe)
    (licences / "readme.txt").write_text("not read")
    assert fingerprint(recipe) == before
    (licences / "licensedcode" / "data" / "licenses" / "mit.LICENSE").write_text("other")
    assert fingerprint(recipe) != before
