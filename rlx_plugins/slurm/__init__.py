"""Recipes as Slurm jobs, and the state of their runs.

job      what a job is, and what is refused before Slurm sees it
render   the sbatch script of a job: job.sh.j2, and trl.sh.j2 or verl.sh.j2 for the launch
submit   the job's files in its run folder, and sbatch
queue    what squeue, scontrol and sacct say about jobs
status   the runs in a folder: Slurm's state where there is one, else what the folder shows
"""
