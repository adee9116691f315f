"""The claims: what each paper says, what is computed here, and when the claim holds."""

from bench.claims.claim import Bound, Claim, exactly
from bench.claims.measurements import (
    double_quantization,
    fp8_range,
    half_log_probabilities,
    hopper_sums,
    int8_outliers,
    loss_scale,
    lost_updates,
    nf4_error,
    nvfp4_error,
    stalled_weights,
    stopped_sums,
)

# 0.9, and as far from it as half a unit in the last place of a bfloat16 number below 1.
_NEAR_0_9 = Bound(0.9 - 2.0**-9, 0.9 + 2.0**-9)

CLAIMS = (
    Claim(
        "lost-updates",
        "An addition loses an update when the weight is 2048 times as large in float16.",
        "Micikevicius et al., Mixed Precision Training, arXiv:1710.03740, section 3.1; for "
        "bfloat16 from its 8 significant bits",
        "section 3.1 re-read",
        "2048; bfloat16 256",
        "the least power of two r with 1 + 1/r = 1 in the dtype's own addition",
        lost_updates,
        {"float16": exactly(2048), "bfloat16": exactly(256)},
    ),
    Claim(
        "stalled-weights",
        "Nearest rounding cancels small updates of bfloat16 weights; Kahan summation, stochastic "
        "rounding and float32 master weights keep them.",
        "Zamirai et al., Revisiting BFloat16 Training, arXiv:2010.06192; master weights from "
        "arXiv:1710.03740",
        "abstract re-read",
        "1 if cancelled, 0.9 if kept (arithmetic)",
        "mean of 10,000 weights of 1 after 100 steps of SGD that each subtract 0.001, under each "
        "precision.update",
        stalled_weights,
        {
            "nearest": exactly(1),
            "master_weights": _NEAR_0_9,
            "remainders": _NEAR_0_9,
            "kahan": _NEAR_0_9,
            "stochastic_rounding": _NEAR_0_9,
        },
    ),
    Claim(
        "stopped-sums",
        "A sum in a 16-bit format of 6 exponent and 9 significand bits stops growing at 4096; sums "
        "of chunks do not.",
        "Wang et al., Training Deep Neural Networks with 8-bit Floating Point Numbers, NeurIPS "
        "2018, arXiv:1812.08011; for float16 from its 11 significant bits",
        "paper not re-read",
        "4096; float16 2048",
        "running sums, rounded after each addition, of 16,384 uniform numbers with mean 1 and "
        "standard deviation 1 and of 5,000 ones in float16; error of 65,536 numbers in chunks of "
        "64",
        stopped_sums,
        {
            "(1,6,9)": exactly(4096),
            "float16": exactly(2048),
            "error in chunks": Bound(greatest=0.005),
        },
    ),
    Claim(
        "fp8-range",
        "E4M3 reaches 448 and E5M2 57344, with least normal numbers of 2^-6 and 2^-14 and "
        "subnormal ones of 2^-9 and 2^-16.",
        "Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433, table 1",
        "table 1 re-read",
        "448, 2^-6, 2^-9; 57344, 2^-14, 2^-16",
        "torch's dtypes, and the number of roundings in which the emulation's formats differ",
        fp8_range,
        {
            "E4M3 max": exactly(448),
            "E4M3 log2 min": exactly(-6),
            "E4M3 log2 sub": exactly(-9),
            "E5M2 max": exactly(57344),
            "E5M2 log2 min": exactly(-14),
            "E5M2 log2 sub": exactly(-16),
            "differences": exactly(0),
        },
    ),
    Claim(
        "double-quantization",
        "Quantising the scales of 4-bit weights, too, saves 0.373 bits a weight.",
        "Dettmers et al., QLoRA, arXiv:2305.14314, section 3",
        "section 3 re-read",
        "0.5 - 0.127 = 0.373",
        "bits a weight of bitsandbytes' tensors in a layer of 4096 x 4096, precision=bnb-nf4 less "
        "bnb-nf4-dq",
        double_quantization,
        {"saved": Bound(0.370, 0.3735)},
    ),
    Claim(
        "nf4-error",
        "NF4 is more exact than FP4 and int4 for normal weights.",
        "Dettmers et al., QLoRA, arXiv:2305.14314, table 2 (mean perplexities of 125M to 13B "
        "models)",
        "table 2 re-read",
        "NF4 27.41, FP4 (E2M1) 31.07, int4 34.34",
        "relative errors of 1024 x 1024 normal weights in blocks of 64: bitsandbytes' NF4 and FP4, "
        "int4 as in precision=int4; the perplexities are not measured",
        nf4_error,
        {"NF4 / next": Bound(greatest=0.95)},
    ),
    Claim(
        "int8-outliers",
        "A few outlier columns ruin int8 products; multiplying those above 6 in 16 bits mends it.",
        "Dettmers et al., LLM.int8(), arXiv:2208.07339; the threshold as in the authors' "
        "announcement of bitsandbytes",
        "abstract re-read",
        "no loss at a threshold of 6.0",
        "relative errors of bitsandbytes' Linear8bitLt on a CPU, threshold 0 and 6, for normal "
        "inputs with one column of 1024 that is 60 times as large",
        int8_outliers,
        {"outliers apart": Bound(greatest=0.0125), "plain / apart": Bound(least=4)},
    ),
    Claim(
        "nvfp4-error",
        "NVFP4 (blocks of 16, E4M3 scales) is more exact than MXFP4 (blocks of 32, powers of two).",
        "NVIDIA, Pretraining Large Language Models with NVFP4, arXiv:2509.25149, section 5 (losses "
        "of an 8B model; MXFP4 needs 36 % more tokens for the same loss)",
        "section 5 re-read",
        "loss 1.5 % against 2.5 % above BF16's",
        "relative errors of 1024 x 1024 normal weights: torchao's MXFP4, NVFP4 as in "
        "precision=nvfp4; the losses are not measured",
        nvfp4_error,
        {"NVFP4 / MXFP4": Bound(greatest=0.9)},
    ),
    Claim(
        "hopper-sums",
        "Hopper sums FP8 products in 14 bits, which costs nearly 2 % at K = 4096; promotion every "
        "128 elements mends it.",
        "DeepSeek-AI, DeepSeek-V3, arXiv:2412.19437, sections 3.3.2 and 3.5.2",
        "sections 3.3.2 and 3.5.2 re-read; they do not say which random numbers",
        "nearly 2 % (0.02)",
        "largest error of a 64 x 64 product of E4M3 operands with the sums of "
        "precision.accumulate=hopper, over the root mean square of the exact product; normal "
        "numbers decide, uniform ones in [0, 1) are shown",
        hopper_sums,
        {
            "normal": Bound(0.005, 0.04),
            "normal promoted": Bound(greatest=0.002),
            "uniform promoted": Bound(greatest=0.002),
        },
    ),
    Claim(
        "log-probabilities",
        "float16 is 8 times as precise as bfloat16, so that log-probabilities deviate 8 times "
        "less.",
        "Qi et al., Defeating the Training-Inference Mismatch via FP16, arXiv:2510.26788",
        "the paragraph on float16's precision re-read",
        "2^10 / 2^7 = 8",
        "root mean squares of the differences to float32's log-probabilities, precision=16-true "
        "and bf16-true, of a GPT with random weights",
        half_log_probabilities,
        {"bfloat16 / float16": Bound(6, 10.5)},
    ),
    Claim(
        "loss-scale",
        "Gradients below 2^-24 become zero in float16; a loss scale keeps them.",
        "Micikevicius et al., Mixed Precision Training, arXiv:1710.03740, sections 3.1 and 3.2 "
        "(5 %: weight gradients of a speech model)",
        "section 3.1 re-read",
        "5 % of a model's are below 2^-24",
        "share of the activations' gradients that float32 has and precision=16-mixed turns into "
        "zero, without a loss scale and with 65,536, in a network trained on digits",
        loss_scale,
        {"scale 1": Bound(least=0.05), "scale 2^16": Bound(greatest=0.02), "overflows": exactly(0)},
    ),
)
