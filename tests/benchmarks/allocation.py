"""Variance that allocation saves, with known and estimated success rates, and the time of the exact optimum.

Run: python -m tests.benchmarks.allocation [--check]; --check exits 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import sys

from tests.benchmarks import allocation_speed, estimated_rates, true_rates


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 when a target is missed")
    check = parser.parse_args().check
    known = true_rates.table()
    others = [*estimated_rates.table(), *allocation_speed.table()]
    targets = [*known, *others]
    value = {target.name: target.value for target in targets}
    missed = [target for target in targets if not target.met]
    print(f"\nTargets: {sum(target.met for target in known)} of {len(known)} cells of table 1 met, and:")
    headline = [target for target in known if target.name.startswith("mid") and "optimum" in target.name]
    for target in [*headline, *others, *(target for target in missed if target in known)]:
        print(f"  {target}")
    print(
        f"allocation: mid optimum {value['mid (bimodal), optimum 8..24']:.3f} at 8..24,"
        f" {value['mid (bimodal), optimum 2..64']:.3f} at 2..64; from history {value['history 8..24']:.3f},"
        f" {value['history 2..64']:.3f}; pilot 8 {value['pilot 8 8..24']:.3f}, {value['pilot 8 2..64']:.3f};"
        f" 1e6 prompts in {value['seconds for 1,000,000 prompts']:.2f} s;"
        f" {len(targets) - len(missed)} of {len(targets)} targets met"
    )
    return int(check and bool(missed))


if __name__ == "__main__":
    sys.exit(main())
