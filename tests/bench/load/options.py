"""The frozen options of `tilewright load` and `configure`, and those that benchmarks of the engine share."""

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
