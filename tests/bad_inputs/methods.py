"""Options that do not go together, or have no effect where they are."""

from __future__ import annotations

from tests.bad_inputs.case import prune, refused

_PRUNE = "prune @llama --output out --num-samples 4 --sequence-length 16"

METHODS = [
    prune("--score fisher --probes 0", "--score fisher", "--probes 0", "--probes 1"),
    prune("--probes 0", "--score fisher", "--probes 0", "--probes 1"),
    prune("--score wanda --probes 1", "--score wanda", "--probes 1", "--probes 0"),
    prune("--score magnitude --probes 1", "--score magnitude", "--probes 1"),
    prune("--rule threshold --probes 1", "--rule threshold", "--probes 2"),
    prune("--rule threshold --score wanda --probes 0", "--rule threshold", "--probes 2"),
    prune("--rule threshold --pattern 2:4 --probes 2", "--rule threshold", "--pattern 2:4"),
    prune("--update sparsegpt --score wanda", "--update sparsegpt", "--score wanda", "leave --score"),
    prune("--update sparsegpt --probes 2", "--update sparsegpt", "--probes 2", "leave --probes"),
    prune("--update sparsegpt --rule threshold", "--update sparsegpt", "--rule threshold", "leave --rule"),
    prune("--update sparsegpt --scope row", "--update sparsegpt", "--scope row", "leave --scope"),
    prune("--update sparsegpt --rounds 0.2,0.5", "--update sparsegpt", "--rounds", "leave --rounds"),
    prune("--update sparsegpt --max-matrix-sparsity 0.9", "--update sparsegpt", "--max-matrix-sparsity 0.9"),
    prune("--update sparsegpt --max-metric-drop 1", "--update sparsegpt", "--max-metric-drop 1.0"),
    prune("--pattern 2:4 --scope row", "--pattern 2:4", "--scope row", "leave --scope"),
    prune("--pattern 2:4 --rounds 0.2,0.5", "--pattern 2:4", "--rounds"),
    prune("--pattern 2:4 --rounds 0.2,0.5 --probes 2", "--pattern 2:4", "--rounds"),
    prune("--pattern 2:4 --max-metric-drop 0.1", "--pattern 2:4", "--max-metric-drop"),
    prune("--pattern 2:4 --max-matrix-sparsity 0.9", "--pattern 2:4"),
    prune("--scope row --max-matrix-sparsity 0.9", "--scope row", "bounds"),
    prune("--score wanda --max-matrix-sparsity 0.9", "--scope row", "bounds"),
    prune("--order sequential --probes 1", "--order sequential", "--probes 2"),
    prune("--order sequential --score wanda", "--order sequential", "--probes 2"),
    prune("--order sequential --rounds 0.2,0.5 --probes 2", "--rounds", "--order joint"),
    prune("--order sequential --max-metric-drop 1 --probes 2", "--max-metric-drop", "--order joint"),
    prune("--rounds 0.2,0.5 --max-metric-drop 1", "--max-metric-drop", "leave --rounds"),
    prune("--rounds 0.2,0.5 --score wanda", "--rounds", "--score wanda"),
    prune("--rounds 0.2,0.5 --min-matrix-sparsity 0.3", "--min-matrix-sparsity", "0.3"),
    # without effect
    prune("--score wanda --fisher token", "--fisher token", "no effect", "leave --fisher"),
    prune("--gradient-threshold 0.5", "--gradient-threshold 0.5", "no effect", "--rule threshold"),
    prune("--probes 1 --reduction-factor 0.5", "--reduction-factor 0.5", "no effect", "--probes 2"),
    prune("--probes 1 --spike-limit 0.5", "--spike-limit 0.5", "no effect", "--probes 2"),
    prune("--score wanda --dense-target 0.5", "--dense-target 0.5", "no effect", "--update admm"),
    prune("--score wanda --damping 0.5", "--damping 0.5", "no effect", "--update admm"),
    prune("--block-order size", "--block-order size", "no effect", "--order sequential"),
    prune("--blocks-per-step 2", "--blocks-per-step 2", "no effect", "--order sequential"),
    prune("--initial-sparsity 0.25", "--initial-sparsity 0.25", "no effect", "--max-metric-drop"),
    prune("--sparsity-step 0.25", "--sparsity-step 0.25", "no effect", "--max-metric-drop"),
    prune("--save-every 3", "--save-every 3", "no effect", "--resume-dir"),
    prune("--evaluation none --evaluation-samples 9", "--evaluation-samples", "no effect"),
    prune("--score magnitude --calibration @plain.txt", "--calibration", "no effect"),
    prune("--score magnitude --checkpointing on", "--checkpointing", "no effect"),
    prune("--score magnitude --accumulator-dtype int8", "--accumulator-dtype", "no effect"),
    prune("--score magnitude --accumulator-device disk", "--accumulator-device", "no effect"),
    prune("--score wanda --accumulator-dtype int8", "--accumulator-dtype", "no effect"),
    prune("--score wanda --checkpointing on", "--checkpointing", "no effect"),
    refused(
        "prune @llama --output out --sequence-length 16 --num-samples 4 --max-metric-drop 1 --evaluation none",
        "--max-metric-drop",
        "--evaluation",
    ),
]
