"""The messages of the Open Inference Protocol over gRPC, described at run time.

`MESSAGES` is a short form of the protocol's public description: message -> fields. Each field is a name, a number and a type.
The type is followed by `*` if the field is repeated, by `{}` if it is a map with string keys, and by `|` if it is in a oneof.
Only fields that this server reads or writes are listed. Other fields are skipped when they arrive, as protobuf requires. The
descriptors are in a pool of their own, so that a client library of the same protocol can be imported in the same process.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

__all__ = ["METHODS", "PACKAGE", "SERVICE", "message"]

PACKAGE = "inference"
SERVICE = "inference.GRPCInferenceService"

METHODS: dict[str, tuple[str, str]] = {
    "ServerLive": ("ServerLiveRequest", "ServerLiveResponse"),
    "ServerReady": ("ServerReadyRequest", "ServerReadyResponse"),
    "ModelReady": ("ModelReadyRequest", "ModelReadyResponse"),
    "ServerMetadata": ("ServerMetadataRequest", "ServerMetadataResponse"),
    "ModelMetadata": ("ModelMetadataRequest", "ModelMetadataResponse"),
    "ModelInfer": ("ModelInferRequest", "ModelInferResponse"),
    "ModelConfig": ("ModelConfigRequest", "ModelConfigResponse"),
    "ModelStatistics": ("ModelStatisticsRequest", "ModelStatisticsResponse"),
    "RepositoryIndex": ("RepositoryIndexRequest", "RepositoryIndexResponse"),
    "RepositoryModelLoad": ("RepositoryModelLoadRequest", "RepositoryModelLoadResponse"),
    "RepositoryModelUnload": ("RepositoryModelUnloadRequest", "RepositoryModelUnloadResponse"),
    "SystemSharedMemoryStatus": ("SystemSharedMemoryStatusRequest", "SystemSharedMemoryStatusResponse"),
    "SystemSharedMemoryRegister": ("SystemSharedMemoryRegisterRequest", "SystemSharedMemoryRegisterResponse"),
    "SystemSharedMemoryUnregister": ("SystemSharedMemoryUnregisterRequest", "SystemSharedMemoryUnregisterResponse"),
}
"""Unary call -> (its request, its response). ModelStreamInfer is not here, because it streams both."""

NAMED = "name 1 string, version 2 string"
TENSOR = "name 1 string, datatype 2 string, shape 3 int64*, parameters 4 InferParameter{}, contents 5 InferTensorContents"
TIMES = "compute_input {0} StatisticDuration, compute_infer {1} StatisticDuration, compute_output {2} StatisticDuration"
MESSAGES: dict[str, str] = {
    "ServerLiveRequest": "",
    "ServerLiveResponse": "live 1 bool",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "ready 1 bool",
    "ModelReadyRequest": NAMED,
    "ModelReadyResponse": "ready 1 bool",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": "name 1 string, version 2 string, extensions 3 string*",
    "ModelMetadataRequest": NAMED,
    "TensorMetadata": "name 1 string, datatype 2 string, shape 3 int64*",
    "ModelMetadataResponse": (
        "name 1 string, versions 2 string*, platform 3 string, inputs 4 TensorMetadata*, outputs 5 TensorMetadata*"
    ),
    "InferParameter": (
        "bool_param 1 bool|, int64_param 2 int64|, string_param 3 string|, double_param 4 double|, uint64_param 5 uint64|"
    ),
    "InferTensorContents": (
        "bool_contents 1 bool*, int_contents 2 int32*, int64_contents 3 int64*, uint_contents 4 uint32*, "
        "uint64_contents 5 uint64*, fp32_contents 6 float*, fp64_contents 7 double*, bytes_contents 8 bytes*"
    ),
    "InferInputTensor": TENSOR,
    "InferRequestedOutputTensor": "name 1 string, parameters 2 InferParameter{}",
    "ModelInferRequest": (
        "model_name 1 string, model_version 2 string, id 3 string, parameters 4 InferParameter{}, inputs 5 InferInputTensor*, "
        "outputs 6 InferRequestedOutputTensor*, raw_input_contents 7 bytes*"
    ),
    "InferOutputTensor": TENSOR,
    "ModelInferResponse": (
        "model_name 1 string, model_version 2 string, id 3 string, parameters 4 InferParameter{}, "
        "outputs 5 InferOutputTensor*, raw_output_contents 6 bytes*"
    ),
    "ModelStreamInferResponse": "error_message 1 string, infer_response 2 ModelInferResponse",
    "ModelConfigRequest": NAMED,
    "ModelInput": "name 1 string, data_type 2 int32, dims 4 int64*",
    "ModelOutput": "name 1 string, data_type 2 int32, dims 3 int64*",
    "ModelDynamicBatching": "preferred_batch_size 1 int32*, max_queue_delay_microseconds 2 uint64",
    "ModelSequenceBatching": "max_sequence_idle_microseconds 1 uint64",
    "Step": "model_name 1 string, model_version 2 int64, input_map 3 string{}, output_map 4 string{}",
    "ModelEnsembling": "step 1 Step*",
    "ModelConfig": (
        "name 1 string, platform 2 string, max_batch_size 4 int32, input 5 ModelInput*, output 6 ModelOutput*, "
        "dynamic_batching 11 ModelDynamicBatching, sequence_batching 13 ModelSequenceBatching, "
        "ensemble_scheduling 15 ModelEnsembling, backend 17 string"
    ),
    "ModelConfigResponse": "config 1 ModelConfig",
    "ModelStatisticsRequest": NAMED,
    "StatisticDuration": "count 1 uint64, ns 2 uint64",
    "InferStatistics": (
        "success 1 StatisticDuration, fail 2 StatisticDuration, queue 3 StatisticDuration, "
        f"{TIMES.format(4, 5, 6)}, cache_hit 7 StatisticDuration, cache_miss 8 StatisticDuration"
    ),
    "InferBatchStatistics": f"batch_size 1 uint64, {TIMES.format(2, 3, 4)}",
    "ModelStatistics": (
        "name 1 string, version 2 string, last_inference 3 uint64, inference_count 4 uint64, execution_count 5 uint64, "
        "inference_stats 6 InferStatistics, batch_stats 7 InferBatchStatistics*"
    ),
    "ModelStatisticsResponse": "model_stats 1 ModelStatistics*",
    "RepositoryIndexRequest": "repository_name 1 string, ready 2 bool",
    "ModelIndex": "name 1 string, version 2 string, state 3 string, reason 4 string",
    "RepositoryIndexResponse": "models 1 ModelIndex*",
    "ModelRepositoryParameter": "bool_param 1 bool|, int64_param 2 int64|, string_param 3 string|, bytes_param 4 bytes|",
    "RepositoryModelLoadRequest": "repository_name 1 string, model_name 2 string, parameters 3 ModelRepositoryParameter{}",
    "RepositoryModelLoadResponse": "",
    "RepositoryModelUnloadRequest": "repository_name 1 string, model_name 2 string, parameters 3 ModelRepositoryParameter{}",
    "RepositoryModelUnloadResponse": "",
    "SystemSharedMemoryStatusRequest": "name 1 string",
    "RegionStatus": "name 1 string, key 2 string, offset 3 uint64, byte_size 4 uint64",
    "SystemSharedMemoryStatusResponse": "regions 1 RegionStatus{}",
    "SystemSharedMemoryRegisterRequest": "name 1 string, key 2 string, offset 3 uint64, byte_size 4 uint64",
    "SystemSharedMemoryRegisterResponse": "",
    "SystemSharedMemoryUnregisterRequest": "name 1 string",
    "SystemSharedMemoryUnregisterResponse": "",
}

Field = descriptor_pb2.FieldDescriptorProto


def _field(into: Any, words: str) -> None:
    """Add a field to a message's description. `words` is "name number type", as in `MESSAGES`."""
    name, number, kind = words.split()
    field = into.field.add(name=name, number=int(number), label=Field.LABEL_OPTIONAL)
    if kind.endswith("{}"):
        entry = into.nested_type.add(name="".join(part.title() for part in name.split("_")) + "Entry")
        entry.options.map_entry = True
        _field(entry, "key 1 string")
        _field(entry, f"value 2 {kind[:-2]}")
        field.label, field.type = Field.LABEL_REPEATED, Field.TYPE_MESSAGE
        field.type_name = f".{PACKAGE}.{into.name}.{entry.name}"
        return
    if kind.endswith("*"):
        field.label = Field.LABEL_REPEATED
    if kind.endswith("|"):
        field.oneof_index = 0
    kind = kind.rstrip("*|")
    if kind in MESSAGES:
        field.type, field.type_name = Field.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
    else:
        field.type = getattr(Field, f"TYPE_{kind.upper()}")


def _pool() -> descriptor_pool.DescriptorPool:
    file = descriptor_pb2.FileDescriptorProto(name="tilewright/inference.proto", package=PACKAGE, syntax="proto3")
    for name, fields in MESSAGES.items():
        into = file.message_type.add(name=name)
        if "|" in fields:
            into.oneof_decl.add(name="parameter_choice")
        for words in filter(None, fields.split(", ")):
            _field(into, words)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return pool


_POOL = _pool()


def message(name: str) -> Any:
    """The class of a message."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))
