"""Generated reviews for the demo, from a small grammar.

Each review has a verdict: stated directly ("the plot is gripping"), by denying its opposite ("not dull at all"), or by
weighing two sides ("a dull first hour, but the ending redeems it"). Neutral sentences extend it to 4 to 60 words.
Counting words predicts the verdict clearly worse than reading them. Training rows do not use the last fifth of a list,
test rows not the first fifth, so some words and phrases of the test are new. 3 % of the labels are wrong on purpose.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from torchlake.errors import OutputError

NOISE = 0.03
TEST_SHARE = 1 / 6
MIN_WORDS, MAX_WORDS = 4, 60
OPPOSITE = {"positive": "negative", "negative": "positive"}
# Shares of direct verdicts, denials, two sides, and contradicted expectations.
KINDS = {"outright": 0.56, "denial": 0.20, "weighing": 0.16, "expectation": 0.08}

ADJECTIVES = {
    "positive": "gripping tender brilliant delightful charming witty moving graceful inventive dazzling warm clever "
    "wonderful touching superb radiant elegant thrilling fresh absorbing magnificent heartfelt beautiful joyful "
    "captivating",
    "negative": "dull clumsy tedious shallow awful boring lifeless sloppy pointless stale dreadful tiresome bland "
    "forgettable grating predictable hollow messy terrible dreary annoying lazy ugly stupid unbearable",
}
NOUNS = {
    "positive": "masterpiece,triumph,joy,gem,treat,delight,small miracle,success,pleasure,treasure",
    "negative": "disaster,bore,mess,failure,waste of time,chore,disappointment,letdown,ordeal,flop",
}
ASPECTS = (
    "plot,acting,dialogue,pacing,opening,music,camera work,first hour,second half,script,cast,humour,love story,"
    "final scene,editing,narration,title song,lead performance,world it builds,last chapter"
)
THINGS = "film,novel,play,album,series,documentary,musical,sequel,thriller,comedy,short story,exhibition"
PEOPLE = "my sister,an old friend,two colleagues,my neighbors,the children,my father,our book club,a room of students"
FOLK = "two bakers,the brothers,some retired judges,young nurses,three thieves,the lighthouse keepers,pilots,old rivals"
DEEDS = (
    "move to the coast,inherit an old house,plan a journey,search for a lost letter,open a small shop,"
    "cross the desert,return home after years,wait for a train"
)
DAYS = "Monday,Tuesday,Wednesday,Thursday,Friday,Saturday,Sunday"

# {adj} and {noun} express the verdict; {opp} and {oppnoun} its opposite.
OUTRIGHT = (
    "the {aspect} is {adj}",
    "I found the {aspect} {adj}",
    "this {thing} is a {noun}",
    "it is {adj} from start to finish",
    "a {adj} {thing}, and a {noun} besides",
    "the {aspect} turns out to be {adj}",
    "everything about the {aspect} feels {adj}",
    "what a {noun} this {thing} is",
    "rarely is a {thing} this {adj}",
    "the {aspect} remains {adj} to the end",
)
DENIAL = (
    "the {aspect} is not {opp} at all",
    "there is nothing {opp} about the {aspect}",
    "this {thing} is hardly a {oppnoun}",
    "I would not call the {aspect} {opp}",
    "the {aspect} is anything but {opp}",
    "it is never {opp}",
    "nobody could say that the {aspect} is {opp}",
    "this {thing} is no {oppnoun}",
    "the {aspect} is far from {opp}",
    "at no point does it become {opp}",
)
# {win} decides, {lose} does not.
WEIGHING = (
    "{lose}, but {win}",
    "although {lose}, {win}",
    "{win}, even though {lose}",
    "{lose}, and yet {win}",
    "{win}, and that counts for more than that {lose}",
    "{lose}; what stays with me is that {win}",
    "while {lose}, in the end {win}",
    "granted, {lose}, still {win}",
    "it hardly matters that {lose}, because {win}",
    "{win}, never mind that {lose}",
)
TURNS = {
    "positive": (
        "the {aspect} is {opp}, but the ending redeems it",
        "for a while it seems {opp}, then it won me over",
        "a {opp} first hour, and I would still watch it again tomorrow",
        "the {aspect} is {opp}, which I forgave within minutes",
        "yes, the {aspect} is {opp}, and I loved it anyway",
    ),
    "negative": (
        "the {aspect} is {opp}, but the ending ruins it",
        "for a while it seems {opp}, then it lost me",
        "a {opp} first hour, and I would still never watch it again",
        "the {aspect} is {opp}, which could not save it",
        "yes, the {aspect} is {opp}, and I walked out anyway",
    ),
}
EXPECTATION = (
    "I expected something {opp} and got something {adj}",
    "the critics call it {opp}, to me it is {adj}",
    "I was promised a {oppnoun} and was given a {noun}",
    "the {aspect} could have been {opp}, instead it is {adj}",
    "where the first {thing} was {opp}, this one is {adj}",
    "people told me that it was a {oppnoun}; people were wrong",
)
NEUTRAL = (
    "It runs for {number} minutes.",
    "We saw it on a {day} with {people}.",
    "The story follows {folk} who {deed}.",
    "There are {number} pages about how {folk} {deed}.",
    "My copy came on a {day}.",
    "Most of it takes place in one room, where {folk} {deed}.",
    "It was made some {number} weeks ago.",
    "I went there with {people} because it rained.",
    "Halfway through, {folk} {deed}.",
    "I read about it on a {day} and asked {people} to come along.",
)


def write_reviews(folder: str | Path, rows: int = 2400, seed: int = 0) -> tuple[Path, Path]:
    """Write `folder`/train.parquet (5/6 of the rows) and test.parquet, and return their paths.

    Columns: id (unique), text (unique), label ("positive" or "negative"), all strings. The same seed gives the same
    tables. rows: 12 to 50,000. Raises OutputError if the folder cannot be created.
    """
    assert 12 <= rows <= 50_000, "sizes for which the grammar has enough texts"
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder}: cannot be made: {error.strerror}. Name another folder.") from error
    test_rows = round(rows * TEST_SHARE)
    seen: set[str] = set()
    paths = (folder / "train.parquet", folder / "test.parquet")
    for stream, (path, count) in enumerate(zip(paths, (rows - test_rows, test_rows), strict=True)):
        rng = np.random.Generator(np.random.Philox([seed, stream]))
        pq.write_table(_reviews(rng, path.stem, count, seen), path, compression="zstd", write_page_checksum=True)
    return paths


def _reviews(rng: np.random.Generator, split: str, count: int, seen: set[str]) -> pa.Table:
    texts: list[str] = []
    labels: list[str] = []
    while len(texts) < count:
        verdict = ("positive", "negative")[len(texts) % 2]
        text = _review(rng, split, verdict)
        if text in seen or not MIN_WORDS <= len(text.split()) <= MAX_WORDS:
            continue
        seen.add(text)
        texts.append(text)
        labels.append(OPPOSITE[verdict] if rng.random() < NOISE else verdict)
    order = rng.permutation(count)
    return pa.table(
        {
            "id": [f"{split}-{row:05d}" for row in range(count)],
            "text": [texts[row] for row in order],
            "label": [labels[row] for row in order],
        }
    )


def _review(rng: np.random.Generator, split: str, verdict: str) -> str:
    """Return a review: the sentence with the verdict among a random number of neutral ones."""
    sentences = [_sentence(rng, split, verdict) + "."]
    for _ in range(rng.geometric(0.55) - 1):
        sentences.insert(int(rng.integers(len(sentences) + 1)), _fill(rng, split, _pick(rng, split, NEUTRAL), verdict))
    text = re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", " ".join(sentences))
    return re.sub(r"(?:^|(?<=[.] ))[a-z]", lambda match: match[0].upper(), text)


def _sentence(rng: np.random.Generator, split: str, verdict: str) -> str:
    kind = rng.choice(list(KINDS), p=list(KINDS.values()))
    if kind == "expectation":
        return _fill(rng, split, _pick(rng, split, EXPECTATION), verdict)
    if kind == "weighing" and rng.random() < 0.4:
        return _fill(rng, split, _pick(rng, split, TURNS[verdict]), verdict)
    if kind == "weighing":
        win = _clause(rng, split, verdict, "outright" if rng.random() < 0.8 else "denial")
        lose = _clause(rng, split, OPPOSITE[verdict], "outright")
        return _pick(rng, split, WEIGHING).format(win=win, lose=lose)
    return _clause(rng, split, verdict, str(kind))


def _clause(rng: np.random.Generator, split: str, verdict: str, kind: str) -> str:
    return _fill(rng, split, _pick(rng, split, OUTRIGHT if kind == "outright" else DENIAL), verdict)


def _fill(rng: np.random.Generator, split: str, template: str, verdict: str) -> str:
    """Return the template with words that this split may use."""
    opposite = OPPOSITE[verdict]
    return template.format(
        adj=_pick(rng, split, ADJECTIVES[verdict].split()),
        opp=_pick(rng, split, ADJECTIVES[opposite].split()),
        noun=_pick(rng, split, NOUNS[verdict].split(",")),
        oppnoun=_pick(rng, split, NOUNS[opposite].split(",")),
        aspect=_pick(rng, split, ASPECTS.split(",")),
        thing=_pick(rng, split, THINGS.split(",")),
        people=_pick(rng, split, PEOPLE.split(",")),
        folk=_pick(rng, split, FOLK.split(",")),
        deed=_pick(rng, split, DEEDS.split(",")),
        day=_pick(rng, split, DAYS.split(",")),
        number=int(rng.integers(12, 240)),
    )


def _pick(rng: np.random.Generator, split: str, options: Sequence[str]) -> str:
    """Return a random option; training never uses the last fifth, the test never the first."""
    held = len(options) // 5
    allowed = options[: len(options) - held] if split == "train" else options[held:]
    return allowed[int(rng.integers(len(allowed)))]
