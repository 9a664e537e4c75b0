"""The other verbs: evaluate, estimate, compare, inspect."""

from __future__ import annotations

from tests.bad_inputs.case import refused, unreadable

_EVALUATE = "evaluate @llama --data @plain.txt --sequence-length 16"
_COMPARE = "compare @llama --evaluation @plain.txt --num-samples 4 --sequence-length 16 --evaluation-samples 4"
_ESTIMATE = "estimate @llama --num-samples 4 --sequence-length 16"
_RECOVER = "recover @llama --teacher @llama --output out --text @plain.txt --sequence-length 16"

VERBS = [
    # recover
    unreadable("recover @llama --output out", "--teacher"),
    unreadable("recover @llama --teacher @llama", "--output"),
    unreadable(f"{_RECOVER} --steps x", "--steps", "'x'"),
    unreadable(f"{_RECOVER} --sparsity 0.5", "--sparsity"),
    refused(f"{_RECOVER} --steps 0", "--steps", "0", ">= 1"),
    refused(f"{_RECOVER} --learning-rate 0", "--learning-rate", "0", "2e-4"),
    refused(f"{_RECOVER} --gradient-accumulation-steps 3", "--gradient-accumulation-steps 3", "--batch-size 8"),
    refused(f"{_RECOVER} --warmup-steps 9 --steps 4", "--warmup-steps 9", "--steps 4"),
    refused(f"{_RECOVER} --save-steps 3", "--save-steps 3", "--resume-dir"),
    refused(f"{_RECOVER} --evaluation @plain.txt", "--evaluation", "@plain.txt", "by heart"),
    refused(_RECOVER, "no weight is zero", "--teacher"),
    refused("recover @llama --teacher @vit --output out --text @plain.txt", "ViTForImageClassification"),
    refused("recover @vit --teacher @vit --output out --text @plain.txt", "ViTForImageClassification"),
    refused("recover /no/a --teacher /no/b --output out", "/no/a", "/no/b", "no such"),
    refused("recover @llama --teacher @llama --output @llama --overwrite", "@llama", "another folder"),
    refused(f"{_RECOVER} --text /no/c.txt", "--text", "/no/c.txt", "no such"),
    refused("evaluate @llama", "--data", "--tasks"),
    unreadable(f"{_EVALUATE} --num-samples x", "--num-samples", "'x'"),
    unreadable(f"{_EVALUATE} --num-samples 1.5", "--num-samples", "'1.5'"),
    unreadable(f"{_EVALUATE} --sparsity 0.5", "--sparsity"),
    unreadable(f"{_EVALUATE} --num-samples 0", "--num-samples", "0", ">= 1"),
    unreadable(f"{_EVALUATE} --num-samples -3", "--num-samples", "-3", ">= 1"),
    unreadable(f"{_EVALUATE} --sequence-length 0", "--sequence-length", "0", ">= 2"),
    unreadable(f"{_EVALUATE} --sequence-length 1", "--sequence-length", "1", ">= 2"),
    unreadable(f"{_EVALUATE} --sequence-length -5", "--sequence-length", "-5", ">= 2"),
    unreadable(f"{_EVALUATE} --batch-size 0", "--batch-size", "0", ">= 1"),
    unreadable(f"{_EVALUATE} --batch-size -1", "--batch-size", "-1", ">= 1"),
    refused("evaluate @llama --num-samples 4", "--data"),
    refused("evaluate @llama --data @plain.txt --limit 4", "--limit", "--tasks"),
    refused(
        "evaluate @llama --data @plain.txt --protocol paper --num-samples 4", "--num-samples", "--protocol windows"
    ),
    refused("evaluate @llama --data @plain.txt --against /no/dense", "--against", "/no/dense", "no such"),
    refused("evaluate /no/a --data /no/b.txt --against /no/c", "/no/a", "/no/b.txt", "/no/c"),
    refused("evaluate nobody/none --data @plain.txt --write-card", "nobody/none", "folder"),
    refused("evaluate @llama --data @plain.txt --write-card", "@llama", "README.md"),
    refused("evaluate @vit --protocol paper --data @plain.txt", "ViTForImageClassification"),
    unreadable(f"{_EVALUATE} --protocol c4", "--protocol", "'c4'", "'paper'"),
    refused(f"{_EVALUATE} --num-samples 99999", "99999"),
    refused(f"{_EVALUATE} --sequence-length 999", "999", "64"),
    refused(f"{_EVALUATE} --dtype foo", "--dtype", "'foo'"),
    refused(f"{_EVALUATE} --device-map cuda", "--device-map", "'cuda'"),
    refused(f"{_EVALUATE} --revision v2", "--revision v2"),
    refused("evaluate @vit --data @plain.txt --num-samples 4 --sequence-length 16", "ViTForImageClassification"),
    refused("evaluate @t5 --data @plain.txt --num-samples 4 --sequence-length 16", "plain.txt", "labels"),
    # estimate refuses what prune refuses
    unreadable(f"{_ESTIMATE} --sparsity half", "--sparsity", "'half'"),
    unreadable(f"{_ESTIMATE} --output out", "--output"),
    refused(f"{_ESTIMATE} --sparsity 1.5", "--sparsity", "1.5"),
    refused(f"{_ESTIMATE} --pattern 2:5", "2:5", "16", "not divisible by 5", "--exclude"),
    refused(f"{_ESTIMATE} --pattern 2:64", "2:64", "not divisible by 64"),
    refused(f"{_ESTIMATE} --include nothing", "--include", "'nothing'"),
    refused(f"{_ESTIMATE} --dtype foo", "--dtype", "'foo'"),
    refused(f"{_ESTIMATE} --dtype float8_e4m3fn", "--dtype", "'float8_e4m3fn'"),
    refused(f"{_ESTIMATE} --revision v2", "--revision v2"),
    refused(f"{_ESTIMATE} --update admm --include lm_head", "lm_head", "outside of the blocks"),
    refused(f"{_ESTIMATE} --update admm --include embed_tokens", "embed_tokens"),
    refused(f"{_ESTIMATE} --order sequential --probes 2 --include lm_head", "lm_head", "outside of the blocks"),
    refused(f"{_ESTIMATE} --gradient-threshold '{{\"nothing\":1}}' --rule threshold", "--gradient-threshold"),
    refused(f"{_ESTIMATE} --score wanda --resume --update none --probes 0", "--resume", "no effect"),
    refused("estimate @quantized", "float8_e4m3fn", "--dtype bfloat16"),
    # compare
    unreadable(f"{_COMPARE} --save-every 4", "--save-every"),
    refused(f"{_COMPARE} --methods nothing", "--methods", "'nothing'", "magnitude"),
    refused(f"{_COMPARE} --methods magnitude,magnitud", "--methods", "'magnitud'"),
    refused(f"{_COMPARE} --methods ''", "--methods", "''"),
    refused(f"{_COMPARE} --update obs --methods wanda", "--update obs", "'as configured'"),
    refused(f"{_COMPARE} --assistant-only-loss on", "--assistant-only-loss", "own text"),
    refused(f"{_EVALUATE} --num-samples 4 --assistant-only-loss on", "--assistant-only-loss", "plain.txt"),
    refused(f"{_COMPARE} --methods wanda,wanda", "--methods", "'wanda'", "twice"),
    refused(f"{_COMPARE} --also /no/recipe.yaml", "--also", "/no/recipe.yaml"),
    refused(f"{_COMPARE} --also @sparsty.yaml", "sparsty.yaml", "'sparsty'"),
    refused(f"{_COMPARE} --also @good.yaml --also @good.yaml", "--also", "good"),
    refused(f"{_COMPARE} --also @other-seed.yaml", "other-seed", "--seed"),
    refused(f"{_COMPARE} --sparsity 1.5", "--sparsity", "1.5"),
    refused(f"{_COMPARE} --pattern 2:5", "2:5", "not divisible by 5"),
    refused(f"{_COMPARE} --output @plain.txt", "--output", "@plain.txt"),
    refused(f"{_COMPARE} --overwrite", "--overwrite", "--output"),
    refused("compare @llama --calibration @plain.txt --num-samples 4 --sequence-length 16", "--evaluation"),
    refused(f"{_COMPARE} --evaluation none", "--evaluation"),
    # inspect
    unreadable("inspect @llama more", "more"),
    unreadable("inspect @llama --dtype float32", "--dtype"),
]
