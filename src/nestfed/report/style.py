"""How methods and numbers look: the same in the page, the figures and the tables."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

# Okabe and Ito's colours tell apart under every common colour blindness, and are seen on white and on black. The
# baseline is grey: what it is compared with stands out.
BASELINE = "#7A828C"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7")
# Of groups of people. Paul Tol's light colours: told apart with any kind of colour vision, and not those of methods.
GROUP_COLOURS = ("#77AADD", "#EE8866", "#44BB99", "#EEDD88", "#FFAABB", "#99DDFF", "#BBCC33", "#AAAA00", "#C5CAD0")
DASHES = ((), (7, 3), (2, 2), (9, 3, 2, 3))
MARKERS = "oD^vP*X<>"  # the baseline has the square


class Look(NamedTuple):
    """How a method is drawn."""

    title: str
    colour: str
    dash: tuple[int, ...]  # lengths of strokes and gaps; empty for a full line
    marker: str


def choose_looks(methods: Mapping[str, str], baseline: str | None = None) -> dict[str, Look]:
    """A look for every method (its key and title); more methods than colours begin again with broken lines."""
    others = [method for method in methods if method != baseline]
    place = {method: i for i, method in enumerate(others)}

    def look(method: str) -> Look:
        if method == baseline:
            return Look(methods[method], BASELINE, (), "s")
        i = place[method]
        dash = DASHES[i // len(COLOURS) % len(DASHES)]
        return Look(methods[method], COLOURS[i % len(COLOURS)], dash, MARKERS[i % len(MARKERS)])

    return {method: look(method) for method in methods}


def make_title(name: str) -> str:
    """A column's name as words."""
    return name.replace("_", " ")


def make_file_name(*words: str) -> str:
    """Words as a part of a file's name that every system takes."""
    return "-".join(re.sub(r"[^a-z0-9]+", "-", word.lower()).strip("-") or "x" for word in words)


def format_numbers(values: Iterable[float], digits: int = 4) -> list[str]:
    """Numbers that belong together, with so many decimals; in powers of ten where that would show nothing but zeros or
    a long row of digits.
    """
    values = list(values)
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0)
    powers = largest >= 1e6 or 0 < largest < 0.5 * 10**-digits

    def text(value: float) -> str:
        if not math.isfinite(value):
            return "–" if math.isnan(value) else ("∞" if value > 0 else "−∞")
        plain = f"{value:.3g}" if powers else f"{value:.{digits}f}"
        return (plain.lstrip("-") if float(plain) == 0 else plain).replace("-", "−")

    return [text(value) for value in values]


def format_number(value: float, digits: int = 4) -> str:
    return format_numbers([value], digits)[0]


def format_spread(mean: float, std: float, n: int, digits: int = 4) -> str:
    """Mean ± standard deviation; one value has none."""
    return " ± ".join(format_numbers([mean, std] if n > 1 else [mean], digits))


def format_amount(size: float, unit: str = "") -> str:
    """A large count with three digits: 12.3 M, or with a unit 12.3 MB."""
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(size) >= 0.9995 * factor:
            return f"{float(f'{size / factor:.3g}'):g} {prefix}{unit}"
    return f"{float(f'{size:.3g}'):g} {unit}".strip()


def format_duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
