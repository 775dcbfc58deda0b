"""Reproduces a pre-training run, stage by stage, and proves how close it came.

    python flows/reproduce.py run
    python flows/reproduce.py resume

The whole story is in the class below. What a stage does is in olmo_core_jax/jobs, where it runs in olmo_core_jax/launch,
how it is shown in olmo_core_jax/report; this file only puts them in order.
"""

from metaflow import FlowSpec, Parameter, card, current, step

from olmo_core_jax.launch import flow_entry
from olmo_core_jax.stages import landmark_folder


class Reproduce(FlowSpec):
    """Retrain a reference run from its own first weights, on its own batches, and compare at every step.

    start            fixes the recipe and the run root
    convert_weights  the reference's step-0 weights into our checkpoint, with a parity check of the logits
    build_index      the mixes into an index and the exact data order of both stages
    stage1_train     pre-training
    eval_landmarks   ours against the reference's checkpoints of the same steps, one task a landmark
    warm_adam        stage 1's weights and moments into stage 2's start, every counter accounted for
    stage2_train     the anneal
    final_eval       the whole comparison: a report, with a verdict for every check
    end              prints where the report is
    """

    recipe = Parameter("recipe", default="laptop", help="name of a shipped recipe, or a YAML file")
    output = Parameter(
        "output",
        default="",
        help="run root: a folder or gs:// URI (default: runs/<recipe>-<run id>)",
    )

    @step
    def start(self):
        """Fix what runs and where its results go; later steps and resumed runs use these, never the run's id."""
        plan = flow_entry.plan(self.recipe, self.output, current.run_id)
        flow_entry.require(
            "stage2" in plan.stages, f"{plan.name} has no stage 2: train it with olmo-jax train"
        )
        flow_entry.require_inputs(plan)
        self.recipe_file, self.run_root, self.landmarks = plan.recipe, plan.run_root, plan.landmarks
        print(f"recipe {plan.name}, run root {self.run_root}")
        self.next(self.convert_weights)

    @card(type="blank", id="stage", refresh_interval=1)
    @step
    def convert_weights(self):
        """The reference's step-0 weights become our checkpoint; their logits must agree."""
        self.converted = self._run("convert_weights")
        self.next(self.build_index)

    @card(type="blank", id="stage", refresh_interval=1)
    @step
    def build_index(self):
        """Every shard is measured once; the order of both stages is fixed."""
        self.indexed = self._run("build_index")
        self.next(self.stage1_train)

    @card(type="blank", id="stage", refresh_interval=1)
    @step
    def stage1_train(self):
        """Pre-training, live on the card against the reference's own curve."""
        self.stage1 = self._run("stage1_train")
        self.next(self.eval_landmarks, foreach="landmarks")

    @card(type="blank", id="stage", refresh_interval=1)
    @step
    def eval_landmarks(self):
        """One landmark: held-out loss, next-token KL and benchmark tasks, ours and the reference's."""
        self.landmark = self._run(landmark_folder(self.input))
        self.next(self.warm_adam)

    @card(type="blank", id="stage", refresh_interval=1)
    @step
    def warm_adam(self, inputs):
        """Stage 2 starts from stage 1's weights, both moments and Adam count, and from nothing else."""
        self.evaluated = [task.landmark for task in inputs]
        self.merge_artifacts(inputs, exclude=["landmark"])
        self.warm = self._run("warm_adam")
        self.next(self.stage2_train)

    @card(type="blank", id="stage", refresh_interval=1)
    @step
    def stage2_train(self):
        """The anneal: the same trainer, the recipe's other section."""
        self.stage2 = self._run("stage2_train")
        self.next(self.final_eval)

    @card(type="blank", id="stage", refresh_interval=1)
    @step
    def final_eval(self):
        """Everything side by side: report.html, and a verdict for every check."""
        self.final = self._run("final_eval")
        self.next(self.end)

    @step
    def end(self):
        """What came out, and where to look."""
        from olmo_core_jax.report import html

        figures = self.final["figures"]
        print(f"{figures['checks passed']:.0f} of {figures['checks']:.0f} checks hold")
        print(f"report: {html.page_uri(self.run_root)}")

    def _run(self, folder: str) -> dict:
        """Run one stage's job with its live card; its small artifact holds URIs and the leading figures."""
        return flow_entry.run_stage(folder, self.recipe_file, self.run_root, current.card["stage"])


if __name__ == "__main__":
    flow_entry.prepare("Reproduce")
    Reproduce()
