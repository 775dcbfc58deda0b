"""Reproduces a pre-training run, stage by stage, and proves how close it came.

    python flows/reproduce.py run
    python flows/reproduce.py resume

The whole story is in the class below. What a stage does is in olmo_core_jax/jobs, where it runs in olmo_core_jax/launch,
how it is shown in olmo_core_jax/report; this file only puts them in order.
"""

from metaflow import FlowSpec, Parameter, card, current, step

from olmo_core_jax.launch import flow_entry


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
        from olmo_core_jax.launch import job

        self.converted = self._run(job.convert_weights(self.recipe_file, self.run_root))
        self.next(self.build_index)

    @card(type="blank", id="stage", refresh_interval=1)
    @step
    def build_index(self):
        """Every shard is measured once; the order of both stages is fixed."""
        from olmo_core_jax.launch import job

        self.indexed = self._run(job.build_index(self.recipe_file, self.run_root))
        self.next(self.stage1_train)

    @card(type="blank", id="stage", refresh_interval=1)
    @step
    def stage1_train(self):
        """Pre-training, live on the card against the reference's own curve."""
        from olmo_core_jax.launch import job

        self.stage1 = self._run(job.train(self.recipe_file, self.run_root, "stage1"))
        self.next(self.eval_landmarks, foreach="landmarks")

    @card(type="blank", id="stage", refresh_interval=1)
    @step
    def eval_landmarks(self):
        """One landmark: held-out loss, next-token KL and benchmark tasks, ours and the reference's."""
        from olmo_core_jax.launch import job

        self.landmark = self._run(
            job.evaluate_landmark(self.recipe_file, self.run_root, self.input)
        )
        self.next(self.warm_adam)

    @card(type="blank", id="stage", refresh_interval=1)
    @step
    def warm_adam(self, inputs):
        """Stage 2 starts from stage 1's weights, both moments and Adam count, and from nothing else."""
        from olmo_core_jax.launch import job

        self.evaluated = [task.landmark for task in inputs]
        self.merge_artifacts(inputs, exclude=["landmark"])
        self.warm = self._run(job.warm_adam(self.recipe_file, self.run_root))
        self.next(self.stage2_train)

    @card(type="blank", id="stage", refresh_interval=1)
    @step
    def stage2_train(self):
        """The anneal: the same trainer, the recipe's other section."""
        from olmo_core_jax.launch import job

        self.stage2 = self._run(job.train(self.recipe_file, self.run_root, "stage2"))
        self.next(self.final_eval)

    @card(type="blank", id="stage", refresh_interval=1)
    @step
    def final_eval(self):
        """Everything side by side: report.html, and a verdict for every check."""
        from olmo_core_jax.launch import job

        self.final = self._run(job.final_eval(self.recipe_file, self.run_root))
        self.next(self.end)

    @step
    def end(self):
        """What came out, and where to look."""
        from olmo_core_jax.report import html

        figures = self.final["figures"]
        print(f"{figures['checks passed']:.0f} of {figures['checks']:.0f} checks hold")
        print(f"report: {html.page_uri(self.run_root)}")

    def _run(self, job) -> dict:
        """Run one job with its live card; its small artifact holds URIs and the leading figures."""
        return flow_entry.run_stage(job, current.card["stage"])


if __name__ == "__main__":
    flow_entry.prepare("Reproduce")
    Reproduce()
