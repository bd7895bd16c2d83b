#!/bin/bash
# Train on two nodes of a SLURM cluster: sbatch slurm.sh
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
##SBATCH --gpus-per-node=1

export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0  # the nodes' interface: ip route get ADDRESS-OF-ANOTHER-NODE
srun python plain.py --devices "$SLURM_NTASKS_PER_NODE" --num-nodes "$SLURM_NNODES"
