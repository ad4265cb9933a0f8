"""The two classes of vLLM's that draft with DFlash, one for each of its model runners."""

from knockon.integrations.vllm.adapter import Diversion

SPECULATOR = Diversion(
    module="vllm.v1.worker.gpu.spec_decode.dflash.speculator",
    name="DFlashSpeculator",
    ours="knockon.integrations.vllm.speculator:DominoSpeculator",
    overridden=("load_model", "capture", "_run_model", "sample_draft"),
)
PROPOSER = Diversion(
    module="vllm.v1.spec_decode.dflash",
    name="DFlashProposer",
    ours="knockon.integrations.vllm.proposer:DominoProposer",
    overridden=("load_model", "set_inputs_first_pass", "_sample_draft_tokens"),
)
