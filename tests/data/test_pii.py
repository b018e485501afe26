"""Masking: recall on addresses of every kind, precision on what only looks like one. Numbers are libphonenumber's examples."""

import ipaddress
import random
import time

import phonenumbers
import pytest
from phonenumbers import PhoneNumberFormat, PhoneNumberType

from tilewright.data.document import Document
from tilewright.data.pii import MaskPII, find

AROUND = (
    "Please write to {} for details.", "Our office: {}\nOpen daily", "You can reach her on {}.", "({})", "Name: Bob, {}; age 4",
    "Send it to {}, please.", "{}", '"{}"', "a\t{}\tb",
)  # fmt: skip
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def email(draw: random.Random) -> str:
    user = "".join(draw.choices(LETTERS, k=draw.randint(1, 9))) + draw.choice(["", ".x", "_y9", "-z", "+tag", "12", "%b"])
    site = ".".join("".join(draw.choices(LETTERS + "0123456789", k=draw.randint(1, 9))) for _ in range(draw.randint(1, 3)))
    found = f"{user}@{site}.{draw.choice(['com', 'org', 'co.uk', 'museum', 'de', 'io'])}"
    return found.upper() if draw.random() < 0.2 else found


def address(draw: random.Random) -> str:
    if draw.random() < 0.7:
        return ".".join(str(draw.randint(0 if i else 1, 255)) for i in range(4))
    found = ipaddress.IPv6Address(draw.getrandbits(128) if draw.random() < 0.5 else (0x20010DB8 << 96) | draw.getrandbits(32))
    return draw.choice([str(found), found.exploded, str(found).upper()])


def phone(draw: random.Random) -> str:
    if draw.random() < 0.5:
        forms = ["({}) {}-{:04}", "{}-{}-{:04}", "{}.{}.{:04}", "+1 {} {} {:04}", "1-{}-{}-{:04}", "+1 ({}) {}-{:04}"]
        return draw.choice(forms).format(draw.randint(200, 999), draw.randint(200, 999), draw.randrange(10_000))
    while True:
        region = draw.choice(sorted(phonenumbers.SUPPORTED_REGIONS))
        kind = draw.choice([PhoneNumberType.FIXED_LINE, PhoneNumberType.MOBILE])
        if example := phonenumbers.example_number_for_type(region, kind):
            form = draw.choice([PhoneNumberFormat.INTERNATIONAL, PhoneNumberFormat.E164])
            return phonenumbers.format_number(example, form)


@pytest.mark.parametrize(("kind", "make", "least"), [("email", email, 0.99), ("ip", address, 0.99), ("phone", phone, 0.95)])
def test_recall(kind: str, make, least: float) -> None:
    draw = random.Random(kind)
    missed = []
    for _ in range(2000):
        wanted = make(draw)
        text = draw.choice(AROUND).replace("{}", wanted)
        if not any(text[a:b] == wanted for a, b, found in find(text) if found == kind):
            missed.append(text)
    print(f"{kind}: recall {1 - len(missed) / 2000}")
    assert len(missed) <= (1 - least) * 2000, missed[:20]


def lookalikes(draw: random.Random) -> list[str]:
    n = draw.randint
    return [
        f"version {n(1, 30)}.{n(0, 30)}.{n(0, 99)}.{n(0, 255)}",
        f"v{n(0, 9)}.{n(0, 40)}.{n(0, 9)}.{n(0, 9)}",
        f"pkg=={n(0, 9)}.{n(0, 40)}.{n(0, 9)}.{n(0, 250)}",
        f"Chrome/{n(50, 120)}.0.{n(100, 255)}.{n(0, 200)}",
        f"{n(1, 20)}.{n(0, 20)}.{n(0, 20)}.{n(0, 20)} released",
        f"build 2024.{n(1, 12)}.{n(1, 28)}.{n(1, 99)}",
        f"on {n(2000, 2030)}-{n(1, 12):02}-{n(1, 28):02} we",
        f"{n(1, 28):02}/{n(1, 12):02}/{n(1990, 2030)}",
        f"{n(1, 28):02}.{n(1, 12):02}.{n(1990, 2030)}",
        f"{n(1, 28):02}-{n(1, 12):02}-{n(1990, 2030)}",
        f"at {n(0, 23):02}:{n(0, 59):02}:{n(0, 59):02}",
        f"{n(1, 12):02}-{n(1, 28):02}-{n(10, 99)}",
        f"{n(2000, 2030)}-{n(1, 12):02}-{n(1, 28):02}T{n(0, 23):02}:{n(0, 59):02}:{n(0, 59):02}Z",
        f"x[{n(0, 999)}] = {n(0, 99999)} * {n(0, 9)}.{n(0, 999999)}",
        f"std::vector<int> a{n(0, 9)}::b{n(0, 9)}",
        f"for i in range({n(0, 9999)}, {n(0, 99999)}): y += 0x{n(0, 2**32):x}",
        "127.0.0.1",
        "255.255.255.0",
        "0.0.0.0",
        f"ISBN 978-{n(0, 9)}-{n(10, 99)}-{n(100000, 999999)}-{n(0, 9)}",
        f"id {n(10**9, 10**10 - 1)}",
        f"timestamp {n(10**9, 2 * 10**9)}",
        "user@host",
        "git@github:x/y",
        f"${n(1, 999)},{n(100, 999)}.{n(10, 99)}",
        f"pp. {n(100, 999)}-{n(100, 999)}",
        f"commit {n(0, 2**64):x}",
        f"10.{n(1000, 9999)}/{n(1000, 9999)}.{n(1000, 9999)}",
        f"@app.route('/a{n(0, 9)}')",
        f"MAC 00:1{n(0, 9)}:2b:3c:4d:5e",
        f"lat {n(10, 80)}.{n(1000, 9999)}, {n(10, 80)}.{n(1000, 9999)}",
        "x = a@b",
        "a @ b.c",
    ]


def test_precision_beside_versions_dates_and_code() -> None:
    """As many real ones as lookalikes: of what is found 95 % must be real."""
    draw = random.Random(9)
    wrong = [(text, find(text)) for _ in range(100) for text in lookalikes(draw) if find(text)]
    real = sum(bool(find(make(draw))) for make in (email, address, phone) for _ in range(1000))
    precision = real / (real + len(wrong))
    print(f"precision {precision:.4f}, {len(wrong)} of {100 * len(lookalikes(draw))} lookalikes")
    assert precision > 0.95, wrong[:20]
    assert len(wrong) < 0.01 * 100 * len(lookalikes(draw)), wrong[:20]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("Call 2125550100 or tel. 030 901820", "Call [PHONE] or tel. [PHONE]"),
        ("dns 8.8.8.8 and 9.9.9.9:53", "dns [IP] and [IP]:53"),
        ("see 1.2.3.4 there", "see 1.2.3.4 there"),
        ("<a.b@c.org>, x@y.de!", "<[EMAIL]>, [EMAIL]!"),
        ("nothing at 12:30, 2024-01-02", "nothing at 12:30, 2024-01-02"),
    ],
)
def test_masks(text: str, want: str) -> None:
    document = MaskPII()(Document(text, {}))
    assert document.text == want
    assert sum(document.notes.values()) == want.count("[")


def test_only_the_kinds_that_are_named() -> None:
    assert MaskPII(kinds=("ip",))(Document("a@b.org 93.184.216.34", {})).text == "a@b.org [IP]"


def test_long_texts_take_linear_time() -> None:
    for part in ("a", "1.", "1-", "+1 ", "a.@", ":", "(1) ", "a%", "1 ", "f:", "x@", "a@b."):
        begun = time.perf_counter()
        find(part * 40_000)
        assert time.perf_counter() - begun < 20, part  # a quadratic one takes minutes
