"""What can be measured about a federation beside its accuracy: functions of states, gradients and features."""
