"""Models that are not there, damaged, or no models."""

from __future__ import annotations

from tests.bad_inputs.case import Bad, call, refused, unreadable

_SMALL = "--num-samples 4 --sequence-length 16"


def each(model: str, *names: str) -> list[Bad]:
    """The same model, given to the verbs that load one in a way of their own."""
    return [
        refused(f"prune {model} --output out {_SMALL}", *names),
        refused(f"evaluate {model} --data @plain.txt {_SMALL}", *names),
    ]


CHECKPOINTS = [
    # a path is a path
    *each("/no/such/model", "/no/such/model", "no such"),
    *each("./model", "./model", "no such"),
    *each("~/no/such/model", "~/no/such/model", "no such"),
    refused("prune ../up --output out", "../up", "no such"),
    refused("prune runs/models/mine --output out", "runs/models/mine", "no such"),
    refused("prune /no/model --output out --calibration /no/text.txt", "/no/model", "/no/text.txt"),
    refused("prune /no/model --output out --evaluation /no/text.txt", "/no/model", "/no/text.txt"),
    refused("prune @llama --output out --calibration /no/a.txt --evaluation /no/b.txt", "/no/a.txt", "/no/b.txt"),
    refused("evaluate /no/model --data /no/text.txt", "/no/model", "/no/text.txt"),
    refused("prune @plain.txt --output out", "@plain.txt", "not a folder"),
    refused("prune @empty --output out", "@empty", "config.json"),
    refused("prune '' --output out", "MODEL", "''"),
    refused("prune 'my model' --output out", "'my model'"),
    refused("prune nobody/no-such-model --output out", "'nobody/no-such-model'", "HF_HUB_OFFLINE"),
    refused("evaluate nobody/no-such-model --data pydoc", "'nobody/no-such-model'"),
    refused("estimate nobody/no-such-model", "'nobody/no-such-model'"),
    refused("estimate /no/such/model", "/no/such/model", "no such"),
    refused("estimate @plain.txt", "@plain.txt", "JSON"),
    refused("estimate @empty", "@empty", "config.json"),
    refused("inspect /no/such/model", "/no/such/model", "no such"),
    refused("inspect @plain.txt", "@plain.txt", "not a folder"),
    refused("inspect @empty", "@empty", "config.json"),
    refused("inspect nobody/no-such-model", "nobody/no-such-model", "folder"),
    refused("inspect ''", "''"),
    unreadable("inspect", "DIR"),
    # config.json
    *each("@config-missing", "config-missing", "config.json"),
    *each("@config-cut", "config-cut", "config.json"),
    refused(f"prune @config-list --output out {_SMALL}", "config-list", "config.json"),
    refused(f"prune @config-blank --output out {_SMALL}", "config-blank", "config.json"),
    refused(f"prune @config-binary --output out {_SMALL}", "config-binary", "config.json"),
    *each("@hidden-size-text", "hidden-size-text", "hidden_size", "sixteen"),
    refused(f"prune @heads-wrong --output out {_SMALL}", "heads-wrong", "config.json"),
    *each("@layers-negative", "layers-negative", "num_hidden_layers"),
    *each("@dtype-unknown", "dtype-unknown", "float99"),
    *each("@type-unknown", "type-unknown", "nonsense"),
    refused(f"prune @type-missing --output out {_SMALL}", "type-missing", "model_type"),
    refused("estimate @hidden-size-text", "hidden-size-text", "hidden_size", "sixteen"),
    refused("estimate @dtype-unknown", "dtype-unknown", "float99"),
    refused("estimate @type-unknown", "type-unknown", "nonsense"),
    refused("estimate @config-cut", "config-cut", "config.json"),
    refused("inspect @hidden-size-text", "hidden-size-text", "hidden_size", "sixteen"),
    refused("inspect @dtype-unknown", "dtype-unknown", "float99"),
    refused("inspect @config-cut", "config-cut", "config.json"),
    refused("inspect @type-unknown", "type-unknown", "nonsense"),
    # weights
    *each("@weights-missing", "weights-missing", "model.safetensors"),
    *each("@weights-cut", "weights-cut", "damaged"),
    refused(f"prune @weights-blank --output out {_SMALL}", "weights-blank", "damaged"),
    refused(f"prune @weights-text --output out {_SMALL}", "weights-text", "damaged"),
    *each("@sizes-differ", "sizes-differ", "config.json", "32", "16"),
    *each("@index-cut", "index-cut", "model.safetensors.index.json"),
    refused(f"prune @index-strange --output out {_SMALL}", "index-strange", "model.safetensors.index.json"),
    *each("@shard-missing", "shard-missing", "model-00002-of-"),
    refused(f"prune @shard-cut --output out {_SMALL}", "shard-cut", "damaged"),
    *each("@pickled", "pickled", "pytorch_model.bin", "safetensors"),
    refused(f"prune @pickle-cut --output out {_SMALL}", "pickle-cut", "pytorch_model.bin"),
    refused("inspect @weights-missing", "weights-missing", "model.safetensors"),
    refused("inspect @weights-cut", "weights-cut", "model.safetensors", "damaged"),
    refused("inspect @sizes-differ", "sizes-differ", "config.json"),
    refused("inspect @index-cut", "index-cut", "model.safetensors.index.json"),
    refused("inspect @index-strange", "index-strange", "model.safetensors.index.json"),
    refused("inspect @shard-missing", "shard-missing", "model-00002-of-"),
    refused("inspect @shard-cut", "shard-cut", "damaged"),
    refused("inspect @pickled", "pickled", "safetensors"),
    *each("@tensor-missing", "tensor-missing", "q_proj", "--allow-missing-weights"),
    refused("inspect @tensor-missing", "tensor-missing", "q_proj"),
    # what else lies in the folder
    refused("inspect @own-config-cut", "own-config-cut", "gradprobe_config.json"),
    refused("inspect @own-config-strange", "own-config-strange", "gradprobe_config.json", "sparsty"),
    refused("inspect @own-config-list", "own-config-list", "gradprobe_config.json"),
    call("GradProbeConfig.from_pretrained(at('own-config-cut'))", "own-config-cut", "gradprobe_config.json"),
    call("GradProbeConfig.from_pretrained(at('own-config-strange'))", "gradprobe_config.json", "sparsty", "sparsity"),
    call("GradProbeConfig.from_pretrained(at('llama'))", "@llama", "gradprobe_config.json"),
    call("GradProbeConfig.from_pretrained('/no/such')", "/no/such", "no such"),
    call("GradProbeConfig.from_pretrained('nobody/none')", "nobody/none", "gradprobe_config.json"),
    refused(f"prune @tokenizer-cut --output out --calibration @plain.txt {_SMALL}", "tokenizer"),
    refused(f"prune @tokenizer-missing --output out --calibration @plain.txt {_SMALL}", "tokenizer"),
    refused(f"evaluate @tokenizer-missing --data @plain.txt {_SMALL}", "tokenizer"),
    refused(f"prune @tokenizer-large --output out --calibration @plain.txt {_SMALL}", "tokenizer", "260"),
    refused(f"evaluate @tokenizer-large --data @plain.txt {_SMALL}", "tokenizer", "260"),
    *each("@quantized", "float8_e4m3fn", "--dtype bfloat16"),
    # quantized weights, as bitsandbytes and GPTQ leave them
    *each("@stored-4bit", "stored-4bit", "stored quantized", "made from")[:1],
    *each("@stored-4bit", "stored-4bit", "stored quantized", "pip install -U bitsandbytes")[1:],
    *each("@stored-gptq", "stored-gptq", "stored quantized", "made from")[:1],
    *each("@stored-gptq", "stored-gptq", "stored quantized", "pip install optimum")[1:],
    # what would be an error about a package that is not there, or about shapes
    *each("@stored-torchao", "stored-torchao", "stored quantized", "made from")[:1],
    *each("@stored-bitnet", "stored-bitnet", "stored quantized", "made from")[:1],
    refused("estimate @stored-gptq", "stored-gptq", "stored quantized", "made from"),
    call("prune(four_bit)", "q_proj", "torch.uint8", "quantized", "dequantize"),
    call("prune(eight_bit)", "q_proj", "torch.int8", "quantized", "dequantize"),
    call("prune(at('llama'), load_in_8bit=True)", "load_in_8bit", "quantize the result"),
    call("prune(at('llama'), quantization_config=BitsAndBytesConfig(load_in_4bit=True))", "BitsAndBytesConfig"),
    call("prune(at('llama'), quantization_config={'quant_method': 'gptq'})", "quantization_config", "leave it out"),
    # wrapped models; one that is compiled as a whole is unwrapped
    call("prune(torch.nn.DataParallel(llama))", "DataParallel", ".module", "LlamaForCausalLM"),
    call("prune(compiled_inside)", "model.layers.0", "compiled"),
    refused(f"prune @llama --output out {_SMALL} --task image-classification", "--task", "LlamaConfig"),
]
