"""verl 0.9 as a host: single methods by verl's own flags, or every kind of plug-in by a trainer mode.

    python -m rlx_plugins.hosts.verl 'rlx.plugins="advantage=dvao clip=bapo"' ...

is verl's `python -m verl.trainer.main_ppo` with the trainer modes `rlx_sync` and `rlx_colocate_async` registered and
the group `rlx` added to its configuration. Nothing is imported from verl until a run starts.

plugin    entry point of verl: makes `rlx.<name>` known as advantage estimators and policy losses
flags     what those names do
settings  the `rlx` group of the configuration, and what is refused before Ray starts
trainer   the trainer modes; loss: what their training workers compute; program: their rollout side
cpu       verl without an accelerator
"""
