"""The frozen options of `tilewright load` and `configure`, of commands that make an engine, and of its benchmarks."""

LOAD_OPTIONS = {
    *("--report", "--out", "--self-check", "--json", "--endpoint", "--model", "--concurrency", "--rate", "--arrivals"),
    *("--trace", "--speed", "--length-scale", "--limit", "--prompt-tokens", "--output-tokens", "--shared-prefix"),
    *("--batch", "--duration", "--warmup", "--until-stable", "--slo", "--ignore-eos", "--no-ignore-eos", "--timeout"),
    *("--max-in-flight", "--api-key", "--seed", "--shared-memory", "--no-shared-memory", "--wait"),
}
CONFIGURE_OPTIONS = {
    *("--slo", "--prompt-tokens", "--output-tokens", "--replicas", "--quantize", "--kv-cache", "--points", "--seconds"),
    *("--device", "--out", "--json"),
}
SERVED_OPTIONS = {"--streams", "--tokens-in", "--tokens-out", "--runs", "--device", "--json"}
ENGINE_OPTIONS = {
    *("--device", "--dtype", "--quantize", "--max-model-len", "--page-size", "--kv-cache", "--kv-cache-gib"),
    *("--invariant", "--no-invariant", "--bundle", "--strict", "--no-strict", "--host-cache-gib"),
    *("--max-tokens-per-step", "--prefill-chunk", "--memory-fraction", "--speculate", "--draft", "--draft-tokens"),
    *("--tp", "--pp", "--slices", "--prompt-graphs", "--no-prompt-graphs"),
}
