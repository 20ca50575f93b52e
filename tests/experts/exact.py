"""The formats by their definitions, in rational numbers: no floating-point operation decides."""

from fractions import Fraction

E2M1 = [Fraction(v) for v in ("0", "1/2", "1", "3/2", "2", "3", "4", "6")]


def e2m1_value(code: int) -> Fraction:
    """OCP MX v1.0, table 5: sign, exponent (bias 1), one mantissa bit."""
    sign, exponent, mantissa = code >> 3, (code >> 1) & 3, code & 1
    size = (
        Fraction(mantissa, 2)
        if exponent == 0
        else (1 + Fraction(mantissa, 2)) * 2 ** (exponent - 1)
    )
    return -size if sign else size


def e4m3_value(code: int) -> Fraction | None:
    """OCP FP8: sign, exponent (bias 7), three mantissa bits; None is NaN."""
    sign, exponent, mantissa = code >> 7, (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return None
    if exponent == 0:
        size = Fraction(mantissa, 8) / 64
    else:
        size = (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)
    return -size if sign else size


E4M3_POSITIVE = [v for v in map(e4m3_value, range(128)) if v is not None]


def e8m0_value(code: int) -> Fraction | None:
    return None if code == 255 else Fraction(2) ** (code - 127)


def nearest(x: Fraction, values: list[Fraction]) -> int:
    """Index of the value nearest to |x|; ties to the even index, beyond the last one saturates."""
    x = abs(x)
    return min(range(len(values)), key=lambda i: (abs(values[i] - x), i % 2))


def floor_log2(x: Fraction) -> int:
    e = 0
    while Fraction(2) ** e > x:
        e -= 1
    while Fraction(2) ** (e + 1) <= x:
        e += 1
    return e
