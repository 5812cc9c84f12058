"""What lets verl's own loop run on a CPU: loaded by verl in each process, by VERL_USE_EXTERNAL_MODULES=verl_cpu.

verl has no CPU platform, and its rollouts need vLLM or SGLang. Here are a platform that computes on the CPU (Ray is
told of pretended GPUs), a hand-over of weights in a file, and an agent loop manager that generates with
``transformers``. All else is verl's: Ray, TransferQueue, FSDP workers, reward workers, the trainer's loop.
"""

import functools
import os
import types
from pathlib import Path

import torch
import transfer_queue as tq
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.plugin.platform import platform_manager
from verl.plugin.platform.platform_cuda import PlatformCUDA

FOLDER = Path(os.environ.get("VERL_CPU_FOLDER", "."))


class CPU(types.ModuleType):
    """torch.cpu with what verl calls on torch.cuda."""

    def __getattr__(self, name):
        return getattr(torch.cpu, name)

    @staticmethod
    def empty_cache():
        pass

    @staticmethod
    def max_memory_allocated():
        return 0

    max_memory_reserved = memory_allocated = memory_reserved = max_memory_allocated

    @staticmethod
    def mem_get_info():
        return 0, 0

    @staticmethod
    def get_device_name():
        return "cpu"


class PlatformCPU(PlatformCUDA):
    device_name = property(lambda self: "cpu")
    device_module = property(lambda self: CPU("cpu"))

    def is_available(self):
        return True

    def current_device(self):
        return torch.device("cpu")

    def device_count(self):
        return 1

    def set_device(self, device_index):
        pass

    def synchronize(self, device_index=None):
        pass

    def empty_cache(self):
        pass

    def set_allocator_settings(self, settings):
        pass

    def communication_backend_name(self):
        return "gloo"

    def ray_noset_envvars(self):
        return []


platform_manager._current_platform = PlatformCPU()  # before the modules that ask for it are loaded

from verl.single_controller.base.decorator import Dispatch, register  # noqa: E402
from verl.trainer.ppo.v1 import register_trainer, trainer_base  # noqa: E402
from verl.utils.tensordict_utils import list_of_dict_to_tensordict  # noqa: E402
from verl.workers import engine_workers  # noqa: E402

from tpo_gym.llm.verl.plugin import TargetPOTrainerSync  # noqa: E402


@register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
def hand_over_weights(self, global_steps=None, mode="auto"):
    weights = {name: value.clone() for name, value in self.actor.engine.get_per_tensor_param()[0]}
    if self.rank == 0:
        torch.save(weights, FOLDER / f"weights{global_steps}.pt")
    return {}


# Replaced in verl's own classes: its colocation of workers takes no others. The default backend names the CPU twice.
engine_workers.ActorRolloutRefWorker.update_weights = hand_over_weights
engine_workers.initialize_global_process_group_ray = functools.partial(
    engine_workers.initialize_global_process_group_ray, backend="gloo"
)


class NoServers:
    """In verl's LLM servers' place, which cannot be made without an inference engine."""

    @classmethod
    def create_empty(cls, config):
        return cls()

    def get_replicas(self):
        return []

    def get_client(self):
        return None


trainer_base.LLMServerManager = NoServers


@register_trainer("tpo_cpu")
class Trainer(TargetPOTrainerSync):
    _enable_hybrid_replicas = False  # no inference engine beside the workers

    def _update_actor(self, batch, metrics):
        fields = ["input_ids", "prompts", "responses", "response_mask", "rm_scores", "old_log_probs", "advantages"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        record = {name: list(data[name].unbind()) for name in fields} | {"keys": list(batch.keys)}
        batch = super()._update_actor(batch, metrics)
        torch.save(record | {"metrics": dict(metrics)}, FOLDER / f"batch{self.global_steps}.pt")
        return batch


class Manager:
    """In verl's agent loop manager's place: groups of completions from ``transformers``, of unequal size."""

    def __init__(self, config, reward_workers):
        self.config, self.reward_workers, self.calls = config, reward_workers, 0
        path = config.actor_rollout_ref.model.path
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model = AutoModelForCausalLM.from_pretrained(path)

    @classmethod
    def create(cls, config, llm_client, teacher_client, reward_loop_worker_handles):
        return cls(config, reward_loop_worker_handles)

    def generate_sequences(self, batch):
        step, rollout = int(batch["global_steps"]), self.config.actor_rollout_ref.rollout
        self.model.load_state_dict(torch.load(FOLDER / f"weights{step - 1}.pt"), strict=False)
        torch.manual_seed(step)
        for number, (uid, messages, row) in enumerate(zip(batch["uid"], batch["raw_prompt"], batch, strict=True)):
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            prompt = self.tokenizer(text, return_tensors="pt")["input_ids"]
            out = self.model.generate(
                prompt,
                do_sample=True,
                temperature=rollout.temperature,
                num_return_sequences=rollout.n - (number == 0),  # one group misses a candidate, as after a failure
                max_new_tokens=rollout.response_length,
                pad_token_id=self.tokenizer.pad_token_id,
            )
            self.put(uid, step, row, [self.field(prompt[0], line[prompt.shape[1] :], row) for line in out])

    def field(self, prompt, response, row):
        ends = (response == self.tokenizer.eos_token_id).nonzero()
        response = response[: int(ends[0]) + 1] if len(ends) else response
        text = self.tokenizer.decode(response, skip_special_tokens=True)
        scores = torch.zeros(len(response))
        scores[-1] = text.count("a") / max(1, len(text))
        mask = torch.ones_like(response)
        if len(response) > 4:
            mask[2] = 0  # as a tool's answer within a conversation
        ids = torch.cat([prompt, response])
        return {
            "prompts": prompt,
            "responses": response,
            "response_mask": mask,
            "loss_mask": mask,
            "input_ids": ids,
            "position_ids": torch.arange(len(ids)),
            "rm_scores": scores,
            "rollout_log_probs": torch.zeros(len(response)),
            "num_turns": 2,
            "extra_fields": {},
            "multi_modal_inputs": {},
        }

    def put(self, uid, step, row, fields):
        tags = [
            {
                "status": "success",
                "prompt_len": len(field["prompts"]),
                "response_len": len(field["responses"]),
                "seq_len": len(field["input_ids"]),
                "global_steps": step,
                "min_global_steps": step - 1,
                "max_global_steps": step - 1,
            }
            for field in fields
        ]
        fields = [field | {"uid": uid} for field in fields]
        keys = [f"{uid}_{session}_0" for session in range(len(fields))]
        tq.kv_batch_put(keys=keys, partition_id="train", fields=list_of_dict_to_tensordict(fields), tags=tags)
        tq.kv_batch_put(keys=[uid], partition_id="train", tags=[{"status": "finished"}])
