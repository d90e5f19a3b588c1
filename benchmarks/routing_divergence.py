"""Count rows that a lower precision routes to other experts: softmax and sheaf-padic, random and with planted ties.

python -m benchmarks.routing_divergence > benchmarks/results/routing-divergence.json
"""

import argparse
import json

import torch

from benchmarks.machine import describe_machine
from whet.config.quality import Quality
from whet.data.sources.source import open_source
from whet.hardware import choose_device
from whet.recipes.quality.regression import Regression
from whet.recipes.quality.row_batches import read_rows
from whet.recipes.quality.tabular_model import QualitySpec, new_quality_model
from whet.studies.diagnose import diagnose_batch

ROWS, SEEDS = 2048, 4


def make_model(arm, seed, planted):
    model = new_quality_model(QualitySpec.from_config(Quality(quality="nano", arm=arm)), seed=seed)
    if planted:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            # one expert always ranks first; two others are nearly equal and compete for the second rank
            model.router.bias.copy_(torch.tensor([-5.0, 0.0, 0.0, 5.0]))
            model.router.weight[2] = model.router.weight[1] + 2e-4 * torch.randn(96, generator=generator)
    return model


def main():
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    device = choose_device()
    rows = read_rows(open_source(f"synth:quality:{ROWS}"), inputs=96, outputs=20)
    batch = rows.batch(range(ROWS)).to(device)
    output = {"machine": describe_machine(), "device": str(device), "rows": ROWS * SEEDS, "divergent": {}}
    for planted in (False, True):
        for arm in ("softmax", "sheaf-padic"):
            counts = {}
            for seed in range(SEEDS):
                model = make_model(arm, seed, planted).to(device)
                for result in diagnose_batch(model, Regression(), batch).results:
                    counts[result.path.name] = counts.get(result.path.name, 0) + len(result.divergent)
            output["divergent"][f"{arm}, {'planted ties' if planted else 'as drawn'}"] = counts
    print(json.dumps(output, indent=2))


if __name__ == "__main__":
    main()
