from google.protobuf import wrappers_pb2 as _wrappers_pb2
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TokenUsage(_message.Message):
    __slots__ = ("api_protocol", "model", "input_tokens", "output_tokens", "total_tokens", "input_token_details", "provider_total_tokens", "extraction_status")
    class Extraction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        EXTRACTION_UNSPECIFIED: _ClassVar[TokenUsage.Extraction]
        EXTRACTION_COMPLETE: _ClassVar[TokenUsage.Extraction]
        EXTRACTION_PARTIAL: _ClassVar[TokenUsage.Extraction]
        EXTRACTION_FAILED: _ClassVar[TokenUsage.Extraction]
    EXTRACTION_UNSPECIFIED: TokenUsage.Extraction
    EXTRACTION_COMPLETE: TokenUsage.Extraction
    EXTRACTION_PARTIAL: TokenUsage.Extraction
    EXTRACTION_FAILED: TokenUsage.Extraction
    class InputDetails(_message.Message):
        __slots__ = ("cached_tokens",)
        CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
        cached_tokens: _wrappers_pb2.UInt64Value
        def __init__(self, cached_tokens: _Optional[_Union[_wrappers_pb2.UInt64Value, _Mapping]] = ...) -> None: ...
    API_PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    INPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    INPUT_TOKEN_DETAILS_FIELD_NUMBER: _ClassVar[int]
    PROVIDER_TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXTRACTION_STATUS_FIELD_NUMBER: _ClassVar[int]
    api_protocol: int
    model: str
    input_tokens: _wrappers_pb2.UInt64Value
    output_tokens: _wrappers_pb2.UInt64Value
    total_tokens: _wrappers_pb2.UInt64Value
    input_token_details: TokenUsage.InputDetails
    provider_total_tokens: _wrappers_pb2.UInt64Value
    extraction_status: TokenUsage.Extraction
    def __init__(self, api_protocol: _Optional[int] = ..., model: _Optional[str] = ..., input_tokens: _Optional[_Union[_wrappers_pb2.UInt64Value, _Mapping]] = ..., output_tokens: _Optional[_Union[_wrappers_pb2.UInt64Value, _Mapping]] = ..., total_tokens: _Optional[_Union[_wrappers_pb2.UInt64Value, _Mapping]] = ..., input_token_details: _Optional[_Union[TokenUsage.InputDetails, _Mapping]] = ..., provider_total_tokens: _Optional[_Union[_wrappers_pb2.UInt64Value, _Mapping]] = ..., extraction_status: _Optional[_Union[TokenUsage.Extraction, str]] = ...) -> None: ...
