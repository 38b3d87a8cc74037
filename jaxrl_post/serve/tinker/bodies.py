"""The bodies of the Tinker API's requests, by the name of their path."""

from __future__ import annotations

from typing import Any

from jaxrl_post.serve import schema
from jaxrl_post.serve.tinker import forms

_LIFETIME = schema.only(None, "saved weights stay until their files are removed")


class _Typed(schema.Body):
    type: Any = None


class CreateSession(_Typed):
    tags: Any = None
    user_metadata: Any = None
    sdk_version: Any = None
    project_id: Any = None


class Heartbeat(_Typed):
    session_id: schema.Name


class CreateSamplingSession(_Typed):
    session_id: schema.Name
    base_model: schema.Name | None = None
    model_path: schema.Name | None = None
    sampling_session_seq_id: schema.Number | None = None


class CreateModel(_Typed):
    session_id: schema.Name
    base_model: schema.Name
    model_seq_id: schema.Number | None = None
    lora_config: forms.LoraConfig = forms.LoraConfig(rank=0)
    user_metadata: Any = None


class Named(_Typed):
    model_id: schema.Name


class Trained(Named):
    seq_id: schema.Number | None = None


class Forward(Trained):
    forward_input: forms.PassInput

    def made(self, limits: forms.Limits) -> forms.Pass:
        return self.forward_input.read(limits)


class ForwardBackward(Trained):
    forward_backward_input: forms.PassInput

    def made(self, limits: forms.Limits) -> forms.Pass:
        return self.forward_backward_input.read(limits)


class OptimStep(Trained):
    adam_params: forms.AdamParams


class SaveWeightsForSampler(Trained):
    path: schema.Name | None = None
    sampling_session_seq_id: schema.Number | None = None
    ttl_seconds: _LIFETIME = None
    overwrite: bool = False


class SaveWeights(SaveWeightsForSampler):
    path: schema.Name


class LoadWeights(Trained):
    path: schema.Name
    optimizer: bool = False


class WeightsInfo(schema.Body):
    tinker_path: schema.Name


class Fetched(schema.Body):
    request_id: schema.Name
    allow_metadata_only: Any = None


POSTS: dict[str, type[schema.Body]] = {
    "create_session": CreateSession,
    "session_heartbeat": Heartbeat,
    "create_sampling_session": CreateSamplingSession,
    "create_model": CreateModel,
    "get_info": Named,
    "unload_model": Named,
    "forward": Forward,
    "forward_backward": ForwardBackward,
    "optim_step": OptimStep,
    "save_weights": SaveWeights,
    "save_weights_for_sampler": SaveWeightsForSampler,
    "load_weights": LoadWeights,
    "weights_info": WeightsInfo,
    "asample": forms.SampleBody,
}


def read(form: type[schema.Body], value: Any, limits: forms.Limits) -> tuple[Any, ...]:
    """Returns a body, and what is made of it where it holds datums or a prompt.

    Raises:
      Refusal: it is wrong.
    """
    given = schema.read(form, value)
    made = getattr(given, "made", None)
    return (given,) if made is None else (given, made(limits))
