"""The options of `tilewright train run` and `merge`: frozen, because one that goes or is renamed breaks somebody's script."""

TRAIN_OPTIONS = {
    *("--json", "--model", "--init", "--init-std", "--depth-scaled", "--no-depth-scaled", "--mup-base", "--tokenizer"),
    *(
        "--data",
        "--weights",
        "--text-field",
        "--chat",
        "--no-chat",
        "--shuffle",
        "--no-shuffle",
        "--piece-tokens",
        "--out",
        "--device",
        "--dtype",
        "--compute",
        "--graphs",
        "--no-graphs",
    ),
    *("--seed", "--row-tokens", "--micro-rows", "--micro-batches", "--accumulate", "--steps", "--optimizer", "--lr"),
    *("--lr-floor", "--schedule", "--warmup", "--decay", "--beta1", "--beta2", "--eps", "--weight-decay", "--max-norm"),
    *("--loss", "--dpo-beta", "--dpo-smoothing", "--lora-rank", "--lora-alpha", "--lora-rslora", "--no-lora-rslora"),
    *("--lora-dropout", "--lora-targets", "--lora-base", "--lora-adapter"),
    *("--z-loss", "--label-smoothing", "--deterministic", "--no-deterministic", "--max-skipped", "--log-every"),
    *("--save-every", "--save-async", "--no-save-async", "--keep", "--eval-data", "--eval-every", "--eval-rows"),
    *("--sample-every", "--sample-prompt", "--sample-tokens", "--tensorboard", "--no-tensorboard"),
    *("--parallel", "--nodes"),
}
TRAIN_VERBS = {"merge": {"--out", "--dtype"}, "train run": TRAIN_OPTIONS}
